package leased

import (
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// A lock library is everywhere in a program: it brings along what it needs to talk
// to Redis and OpenTelemetry's API, and neither an SDK nor an exporter.

func TestTheLibraryImportsOnlyRedisBackoffAndTheOpenTelemetryAPI(t *testing.T) {
	allowed := []string{
		"github.com/redis/go-redis/v9",
		"github.com/cenkalti/backoff/v4",
		"go.opentelemetry.io/otel",
		"go.opentelemetry.io/otel/attribute",
		"go.opentelemetry.io/otel/codes",
		"go.opentelemetry.io/otel/metric",
		"go.opentelemetry.io/otel/metric/noop",
		"go.opentelemetry.io/otel/trace",
		"go.opentelemetry.io/otel/trace/noop",
	}
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(err, files)
	}
	used := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range f.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if host, _, _ := strings.Cut(path, "/"); strings.Contains(host, ".") {
				used[path] = true
				if !slices.Contains(allowed, path) {
					t.Errorf("%s imports %s", file, path)
				}
			}
		}
	}
	for _, path := range allowed {
		if !used[path] {
			t.Errorf("%s is allowed and not used", path)
		}
	}
}

func TestNoSDKOrExporterIsAmongTheLibrarysDependencies(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, "go.opentelemetry.io/otel/trace") {
		t.Fatalf("these cannot be all: %v", deps)
	}
	for _, dep := range deps {
		for _, heavy := range []string{"go.opentelemetry.io/otel/sdk", "go.opentelemetry.io/otel/exporters", "google.golang.org/grpc", "github.com/alicebob"} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("it depends on %s", dep)
			}
		}
	}
}
