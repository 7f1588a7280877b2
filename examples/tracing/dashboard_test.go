package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alicebob/miniredis/v2"

	"github.com/leasedmutex/leased"
)

// A dashboard that asks for a series nobody exports is empty and looks like calm. So
// what it asks for is compared with what Prometheus would scrape from a process that
// uses a lock.
func TestTheDashboardAsksOnlyForWhatIsExported(t *testing.T) {
	exported := scrape(t, "text/plain")
	series, labels := map[string]bool{}, map[string]bool{
		"job": true, "instance": true, "le": true, // given by Prometheus, and by histograms
	}
	for _, m := range regexp.MustCompile(`(?m)^(leased_\w+)\{([^}]*)\}`).FindAllStringSubmatch(exported, -1) {
		series[m[1]] = true
		for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(m[2], -1) {
			labels[l[1]] = true
		}
	}
	asked := map[string]bool{}
	for _, expr := range expressions(t, "../../docs/grafana-dashboard.json") {
		for _, name := range regexp.MustCompile(`leased_\w+`).FindAllString(expr, -1) {
			if asked[name] = true; !series[name] && !labels[name] {
				t.Errorf("%s\n\tnobody exports %s", expr, name)
			}
		}
		for _, by := range regexp.MustCompile(`by \((\w+)\)|\b(\w+)=~`).FindAllStringSubmatch(expr, -1) {
			if l := by[1] + by[2]; !labels[l] {
				t.Errorf("%s\n\tno series has the label %s", expr, l)
			}
		}
	}
	for name := range series {
		if !asked[name] && !strings.HasSuffix(name, "_sum") && !strings.HasSuffix(name, "_count") {
			t.Errorf("no panel shows %s", name)
		}
	}
}

// From a slow bucket to a trace that was slow.
func TestTheWaitHistogramHasExemplarsThatNameATrace(t *testing.T) {
	exported := scrape(t, "application/openmetrics-text; version=1.0.0")
	if !regexp.MustCompile(`(?m)^leased_wait_duration_seconds_bucket.*# \{.*trace_id="[0-9a-f]{32}"`).MatchString(exported) {
		t.Errorf("no bucket has an exemplar:\n%s", exported)
	}
}

// scrape returns what Prometheus would get from a process in which a lock was used.
func scrape(t *testing.T, format string) string {
	address, _ := collector(t)
	otel, err := newTelemetry(t.Context(), "test", address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := otel.stop(); err != nil {
			t.Error(err)
		}
	}()
	m := miniredis.RunT(t)
	rdb, err := connect(t.Context(), "redis://"+m.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer rdb.Close()
	client, err := leased.New(rdb, leased.WithTracerProvider(otel.traces), leased.WithMeterProvider(otel.metrics))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, span := otel.traces.Tracer("test").Start(t.Context(), "test")
	defer span.End()
	lease, err := client.Mutex("m").LockContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Unlock(); err != nil {
		t.Fatal(err)
	}
	request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	request.Header.Set("Accept", format)
	answer := httptest.NewRecorder()
	otel.scrape.ServeHTTP(answer, request)
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.Code != 200 {
		t.Fatalf("status %d, %v: %s", answer.Code, err, text)
	}
	return string(text)
}

// expressions returns what the panels of a dashboard ask Prometheus.
func expressions(t *testing.T, name string) []string {
	var dashboard struct {
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
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(dashboard.Templating.List, func(v struct{ Name, Type string }) bool {
		return v.Name == "datasource" && v.Type == "datasource"
	}) {
		t.Errorf("%s has no variable for the data source", name)
	}
	var all []string
	for _, p := range dashboard.Panels {
		if len(p.Targets) == 0 {
			t.Errorf("panel %q asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			all = append(all, target.Expr)
			if target.Datasource.UID != "${datasource}" {
				t.Errorf("panel %q has a data source of its own", p.Title)
			}
		}
	}
	if len(all) == 0 {
		t.Errorf("%s has no panels", name)
	}
	return all
}
