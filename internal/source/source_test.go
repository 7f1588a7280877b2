package source

import (
	"go/token"
	"slices"
	"testing"
)

func TestThePackagesAreThoseOfTheLibraryEachAfterWhatItImports(t *testing.T) {
	all, err := Packages()
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, p := range all {
		paths = append(paths, p.Path)
		if !Own(p.Path) {
			t.Errorf("%s is not of the library", p.Path)
		}
	}
	for _, importer := range []string{"/internal/lockstate", "/internal/redisserver", ""} {
		protocol, at := slices.Index(paths, Module+"/internal/protocol"), slices.Index(paths, Module+importer)
		if protocol < 0 || at < protocol {
			t.Errorf("%s%s is at %d, and the protocol that it imports at %d", Module, importer, at, protocol)
		}
	}
	root := all[len(all)-1]
	files, err := root.Parse(token.NewFileSet())
	if err != nil || len(files) != len(root.Files) || files[0].Name.Name != "leased" {
		t.Errorf("%d of %d files of %s, %v", len(files), len(root.Files), root.Path, err)
	}
	if Own(Module + "x") {
		t.Error("another module whose path begins alike is taken for the library")
	}
}

func TestAnEmptyPackageIsNamedAsItCallsItself(t *testing.T) {
	i := Importer{}
	for path, want := range map[string]string{
		"github.com/redis/go-redis/v9":    "redis",
		"github.com/cenkalti/backoff/v4":  "backoff",
		"go.opentelemetry.io/otel/metric": "metric",
		"context":                         "context",
	} {
		p, err := i.Import(path)
		if err != nil || p.Name() != want || !p.Complete() || i[path] != p {
			t.Errorf("%s: %v, %v", path, p, err)
		}
	}
}
