package redistest

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

// spy stands in for a test that is expected to fail. It has only the methods that the
// helpers call; any other panics on the nil interface.
type spy struct {
	testing.TB
	name     string
	cleanups []func()
	said     []string
}

func (s *spy) Helper()           {}
func (s *spy) Name() string      { return s.name }
func (s *spy) Cleanup(f func())  { s.cleanups = append(s.cleanups, f) }
func (s *spy) Error(args ...any) { s.said = append(s.said, fmt.Sprint(args...)) }
func (s *spy) Skip(args ...any)  { s.said = append(s.said, "skipped: "+fmt.Sprint(args...)) }

func (s *spy) Fatalf(format string, args ...any) {
	s.said = append(s.said, fmt.Sprintf(format, args...))
}

func (s *spy) finish() {
	for i := len(s.cleanups) - 1; i >= 0; i-- {
		s.cleanups[i]()
	}
}

func TestPrefixesDifferAndAreSafeInKeys(t *testing.T) {
	t.Run("odd {name}*[x]", func(t *testing.T) {
		a, b := Prefix(t), Prefix(t)
		if a == b {
			t.Errorf("%q came twice", a)
		}
		if strings.ContainsAny(a, "{}*?[]\\ ") {
			t.Errorf("%q has a character with a meaning", a)
		}
		if !strings.HasPrefix(a, "TestPrefixesDiffer") {
			t.Errorf("%q does not name its test", a)
		}
	})
}
