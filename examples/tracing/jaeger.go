package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"
)

const (
	jaegerModule  = "jaeger" // the directory of the module that names it as a tool
	jaegerPackage = "github.com/jaegertracing/jaeger/cmd/all-in-one"
	jaegerBuilds  = 20 * time.Minute // on a slow machine, with modules to download
)

// jaegerProgram is where the build puts it.
func jaegerProgram() string {
	name := "all-in-one"
	if runtime.GOOS == "windows" {
		name += ".exe"
	}
	return filepath.Join(jaegerModule, "bin", name)
}

// jaegerBuilt says whether the program is there and no older than what its version
// is written in.
func jaegerBuilt() (bool, error) {
	mod, err := os.Stat(filepath.Join(jaegerModule, "go.mod"))
	if err != nil {
		return false, fmt.Errorf("run this in the directory examples/tracing: %w", err)
	}
	program, err := os.Stat(jaegerProgram())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && !program.ModTime().Before(mod.ModTime()), err
}

// buildJaeger builds the program if need be, telling how long it takes so far.
func buildJaeger(ctx context.Context, progress func(format string, args ...any)) error {
	if built, err := jaegerBuilt(); built || err != nil {
		return err
	}
	began := time.Now()
	// Without cgo it needs no C compiler, and without debugging symbols it is a third smaller.
	output, err := filepath.Rel(jaegerModule, jaegerProgram())
	if err != nil {
		return err
	}
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", output, jaegerPackage) //nolint:noctx // ended below
	cmd.Dir = jaegerModule
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	// Interrupted, it lets the compilers that run finish; killed, it would leave them.
	build, err := launch("go build", cmd, func() error { return cmd.Process.Signal(os.Interrupt) })
	if err != nil {
		return fmt.Errorf("cannot build Jaeger, which the go command does: %w", err)
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	limit := time.After(jaegerBuilds)
	for {
		select {
		case <-build.done:
			if !cmd.ProcessState.Success() {
				return fmt.Errorf("cannot build Jaeger: %v\n%s", cmd.ProcessState, build.log)
			}
			// An unchanged program is not written again; that it is up to date counts.
			now := time.Now()
			return os.Chtimes(jaegerProgram(), now, now)
		case <-tick.C:
			progress("   building Jaeger from source, once: %.0f s, of 2 to 5 minutes", time.Since(began).Seconds())
		case <-limit:
			return errors.Join(fmt.Errorf("building Jaeger took more than %v: set aside", jaegerBuilds), build.end())
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), build.end())
		}
	}
}

// jaeger is a running all-in-one: collector, storage in memory, and query.
type jaeger struct {
	*child
	url  string // of the query side
	otlp string // host:port, OTLP over HTTP
}

// startJaeger starts the program that buildJaeger built, on loopback ports.
func startJaeger(ctx context.Context) (*jaeger, error) {
	program, err := filepath.Abs(jaegerProgram())
	if err != nil {
		return nil, err
	}
	var j *jaeger
	variables := []string{
		"QUERY_HTTP_SERVER_HOST_PORT", "COLLECTOR_OTLP_HTTP_HOST_PORT", // the two that we use
		"COLLECTOR_OTLP_GRPC_HOST_PORT", "QUERY_GRPC_SERVER_HOST_PORT", "ADMIN_HTTP_HOST_PORT",
		"COLLECTOR_GRPC_SERVER_HOST_PORT", "COLLECTOR_HTTP_SERVER_HOST_PORT",
	}
	err = onFreePorts(len(variables), func(free []string) error {
		cmd := exec.Command(program) //nolint:noctx // ended by end
		// It would trace itself otherwise, to a collector that is not there.
		cmd.Env = append(os.Environ(), "COLLECTOR_OTLP_ENABLED=true", "SPAN_STORAGE_TYPE=memory", "OTEL_TRACES_SAMPLER=always_off")
		for i, name := range variables {
			cmd.Env = append(cmd.Env, name+"="+free[i])
		}
		c, err := launch("Jaeger", cmd, nil)
		if err != nil {
			return err
		}
		j = &jaeger{c, "http://" + free[0], free[1]}
		return c.await(ctx, 30*time.Second, j.answers)
	})
	if err != nil && j != nil {
		err = errors.Join(err, j.end())
	}
	return j, err
}

// answers returns nil if both sides that we use do.
func (j *jaeger) answers(ctx context.Context) error {
	for _, address := range []string{j.url + "/api/services", "http://" + j.otlp + "/v1/traces"} {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		response.Body.Close() // a collector answers a GET with a refusal, which will do
	}
	return nil
}
