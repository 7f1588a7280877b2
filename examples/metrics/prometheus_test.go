package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/leasedmutex/leased"
)

const (
	dashboard = "../../docs/grafana-dashboard.json"
	rules     = "../../docs/alerts.yaml"
	patience  = time.Minute
)

// program returns the path of one of Prometheus' programs, and skips the test without it.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("LEASED_REQUIRE_PROMETHEUS") == "1" {
			t.Fatalf("LEASED_REQUIRE_PROMETHEUS=1, and there is no %s", name)
		}
		t.Skipf("there is no %s; the Debian package prometheus has it", name)
	}
	return path
}

// A dashboard that asks for a series that nobody exports is empty, and looks like calm; a rule
// that does never fires. So a real Prometheus reads a program's metrics, and is asked.
func TestPrometheusAnswersEveryPanelAndEveryRule(t *testing.T) {
	p := startPrometheus(t, exporting(t))
	names := map[string]bool{}
	for _, kind := range []string{"labels", "label/__name__/values"} {
		var all []string
		p.get(t, kind, &all)
		for _, name := range all {
			names[name] = true
		}
	}
	queries := panels(t)
	groups := p.rules(t)
	if len(queries) < 10 || len(groups) == 0 {
		t.Fatalf("%d queries, %d rules", len(queries), len(groups))
	}
	for _, q := range queries {
		p.answers(t, q)
	}
	for _, r := range groups {
		if r.Health != "ok" || r.LastError != "" {
			t.Errorf("rule %s is %s: %s", r.Name, r.Health, r.LastError)
		}
		queries = append(queries, query{"rule " + r.Name, r.Query})
	}
	shown := map[string]bool{}
	for _, q := range queries {
		for _, name := range regexp.MustCompile(`leased_\w+|\berror_type\b`).FindAllString(q.expr, -1) {
			if shown[name] = true; !names[name] {
				t.Errorf("%s asks for %s, which nobody exports", q.what, name)
			}
		}
	}
	for name := range names {
		if metric := regexp.MustCompile(`^leased_(\w+?(_bucket|_total|_oldest_seconds)|held|waiting|clients|servers)$`).FindString(name); metric != "" && !shown[name] {
			t.Errorf("no panel and no rule shows %s", name)
		}
	}
}

func TestPromtoolAcceptsTheRulesAndEachOfThemFires(t *testing.T) {
	promtool := program(t, "promtool")
	for _, args := range [][]string{{"check", "config", "prometheus.yaml"}, {"check", "rules", rules}, {"test", "rules", "testdata/alerts_test.yaml"}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	tests, err := os.ReadFile("testdata/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(rules)
	if err != nil {
		t.Fatal(err)
	}
	alerts := regexp.MustCompile(`(?m)- alert: (\w+)$`).FindAllStringSubmatch(string(text), -1)
	if len(alerts) == 0 {
		t.Errorf("%s has no rules, or they are no longer found", rules)
	}
	for _, a := range alerts {
		if !strings.Contains(string(tests), "alertname: "+a[1]+"\n        exp_alerts:\n          -") {
			t.Errorf("no test has %s fire", a[1])
		}
	}
}

// exporting serves the metrics of processes that use locks, one of which is in trouble.
func exporting(t *testing.T) *httptest.Server {
	t.Helper()
	provider, scrape, err := newProvider()
	if err != nil {
		t.Fatal(err)
	}
	m := miniredis.RunT(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 3)
	go func() { ended <- work(ctx, m.Addr(), provider) }()
	go func() { ended <- trouble(ctx, t.Output(), provider) }()
	go func() { ended <- quorum(ctx, provider) }()
	web := httptest.NewServer(scrape)
	t.Cleanup(func() {
		web.Close()
		cancel()
		for range cap(ended) {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		if err := provider.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return web
}

// trouble loses leases and has commands refused, until ctx ends.
func trouble(ctx context.Context, log io.Writer, provider *metric.MeterProvider) error {
	m := miniredis.NewMiniRedis()
	if err := m.Start(); err != nil {
		return err
	}
	defer m.Close()
	client, rdb, err := newClient(m.Addr(), provider,
		leased.WithTTL(200*time.Millisecond), leased.WithLossHandler(func(ev leased.LossEvent) { fmt.Fprintln(log, ev) }))
	if err != nil {
		return err
	}
	defer rdb.Close()
	defer client.Close()
	for ctx.Err() == nil {
		lease, err := client.Mutex("trouble").LockContext(ctx)
		if err != nil {
			continue
		}
		m.Del("trouble")
		<-lease.Context().Done()
		if err := lease.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
			return fmt.Errorf("the lease was not lost: %w", err)
		}
		m.SetError("NOAUTH Authentication required.")
		_, _ = client.Mutex("trouble").TryLockContext(ctx)
		m.SetError("")
		time.Sleep(20 * time.Millisecond) // so often trouble comes
	}
	return nil
}

// quorum locks on three servers, until ctx ends.
func quorum(ctx context.Context, provider *metric.MeterProvider) error {
	var rdbs []redis.UniversalClient
	for range 3 {
		m := miniredis.NewMiniRedis()
		if err := m.Start(); err != nil {
			return err
		}
		defer m.Close()
		rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
		defer rdb.Close()
		rdbs = append(rdbs, rdb)
	}
	client, err := leased.NewQuorum(rdbs, leased.WithMeterProvider(provider), leased.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return err
	}
	defer client.Close()
	for ctx.Err() == nil {
		if lease, err := client.Mutex("quorum").LockContext(ctx); err == nil {
			time.Sleep(10 * time.Millisecond) // the work
			_ = lease.Unlock()                // a loss is measured, too
		}
	}
	return nil
}

// server is a Prometheus.
type server struct{ address string }

// startPrometheus starts one that reads the metrics of web, and the rules, and returns when
// it has read them a few times.
func startPrometheus(t *testing.T, web *httptest.Server) server {
	t.Helper()
	path := program(t, "prometheus")
	dir := t.TempDir()
	file, err := filepath.Abs(rules)
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "prometheus.yml")
	text := fmt.Sprintf(`
global: {scrape_interval: 200ms, evaluation_interval: 200ms}
rule_files: [%q]
scrape_configs:
  - job_name: orders
    static_configs: [{targets: [%q]}]
`, file, strings.TrimPrefix(web.URL, "http://"))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := server{free.Addr().String()}
	_ = free.Close()
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address="+p.address, "--log.level=warn")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = log.Close()
		if text, err := os.ReadFile(log.Name()); t.Failed() && err == nil {
			t.Logf("Prometheus: %s", text)
		}
	})
	// The series that come last: rates want two samples of them.
	for until := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		last, err := p.query(`count(rate(leased_command_duration_seconds_count{error_type!=""}[5s])) and count(rate(leased_losses_total[5s]))`)
		if err == nil && len(last) > 0 {
			return p
		}
		if time.Now().After(until) {
			t.Fatalf("Prometheus has not read the metrics within %v: %v", patience, err)
		}
	}
}

// get calls Prometheus' API.
func (p server) get(t *testing.T, path string, into any) {
	t.Helper()
	if err := p.fetch(path, into); err != nil {
		t.Fatal(err)
	}
}

func (p server) fetch(path string, into any) error {
	reply, err := http.Get("http://" + p.address + "/api/v1/" + path)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	var envelope struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(reply.Body).Decode(&envelope); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if envelope.Status != "success" {
		return fmt.Errorf("%s: %s", path, envelope.Error)
	}
	return json.Unmarshal(envelope.Data, into)
}

// query returns the values of a query's answer.
func (p server) query(expr string) (values []string, err error) {
	var answer struct {
		Result []struct{ Value [2]any }
	}
	err = p.fetch("query?query="+url.QueryEscape(expr), &answer)
	for _, r := range answer.Result {
		values = append(values, fmt.Sprint(r.Value[1]))
	}
	return values, err
}

// query is one of a panel or a rule.
type query struct{ what, expr string }

// answers fails t unless the query has an answer, with a number in it and no infinite one.
func (p server) answers(t *testing.T, q query) {
	t.Helper()
	values, err := p.query(q.expr)
	switch {
	case err != nil:
		t.Errorf("%s: %v", q.what, err)
	case !slices.ContainsFunc(values, func(v string) bool { return v != "NaN" }):
		t.Errorf("%s has no answer: %s", q.what, q.expr)
	case slices.Contains(values, "+Inf"):
		t.Errorf("%s has an infinite answer: %s", q.what, q.expr)
	}
}

// rule is one as Prometheus sees it.
type rule struct{ Name, Query, Health, LastError string }

// rules returns those that Prometheus has, when it has evaluated them.
func (p server) rules(t *testing.T) (all []rule) {
	t.Helper()
	for until := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) { // between two looks
		var answer struct {
			Groups []struct{ Rules []rule }
		}
		p.get(t, "rules", &answer)
		all = nil
		for _, g := range answer.Groups {
			all = append(all, g.Rules...)
		}
		if !slices.ContainsFunc(all, func(r rule) bool { return r.Health == "unknown" }) || time.Now().After(until) {
			return all
		}
	}
}

// panels returns the queries of the dashboard, with Grafana's variables as it would fill them in.
func panels(t *testing.T) (queries []query) {
	t.Helper()
	var board struct {
		Templating struct {
			List []struct{ Name, Type string }
		}
		Panels []struct {
			Title   string
			Targets []struct {
				Expr       string
				Datasource struct{ UID string }
			}
		}
	}
	text, err := os.ReadFile(dashboard)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	for _, variable := range []string{"datasource", "job"} {
		if !slices.ContainsFunc(board.Templating.List, func(v struct{ Name, Type string }) bool { return v.Name == variable }) {
			t.Errorf("the dashboard has no variable %s", variable)
		}
	}
	fill := strings.NewReplacer("$__rate_interval", "5s", "$job", ".*")
	for _, panel := range board.Panels {
		if len(panel.Targets) == 0 {
			t.Errorf("panel %q asks for nothing", panel.Title)
		}
		for _, target := range panel.Targets {
			if target.Datasource.UID != "${datasource}" {
				t.Errorf("panel %q has a data source of its own", panel.Title)
			}
			if !strings.Contains(target.Expr, "$job") {
				t.Errorf("panel %q does not ask for the job chosen", panel.Title)
			}
			queries = append(queries, query{fmt.Sprintf("panel %q", panel.Title), fill.Replace(target.Expr)})
		}
	}
	return queries
}
