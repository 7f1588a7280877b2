package leased_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leasedmutex/leased"
)

// Lock names can be secrets.
func TestLogsOfAnUnconfirmedReleaseDoNotNameTheLock(t *testing.T) {
	inVirtualTime(t, func(t *testing.T, s place) {
		var text bytes.Buffer
		c := newClient(t, s, leased.WithTTL(10*time.Second), leased.WithLogger(slog.New(slog.NewTextHandler(&text, nil))))
		mu := c.Mutex("secret-lock")
		outage := func() { s.Mini.SetError("LOADING Redis is loading the dataset in memory") }
		recover := func() {
			time.Sleep(2 * time.Minute) // the next line of the same cause is due
			s.Mini.SetError("")
			time.Sleep(time.Minute)
			synctest.Wait()
		}

		mu.Lock()
		outage()
		mu.Unlock()
		recover()
		err := mu.Do(context.Background(), func(context.Context) error {
			outage()
			return nil
		})
		if err != nil {
			t.Errorf("Do: %v", err)
		}
		recover()
		if n := strings.Count(text.String(), "not confirmed"); n != 2 || strings.Contains(text.String(), "secret") {
			t.Errorf("two releases were not confirmed; logged %q", text.String())
		}
	})
}
