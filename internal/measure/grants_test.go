package main

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestAMeasurementWaitsForNothingForEver(t *testing.T) {
	broken := errors.New("the server is gone")
	for what, c := range map[string]struct {
		done func(calls int) (bool, error)
		err  string
		took time.Duration
	}{
		"it is done":         {func(int) (bool, error) { return true, nil }, "", 0},
		"it is done in time": {func(calls int) (bool, error) { return calls == 10, nil }, "", 9 * time.Second},
		"it fails":           {func(calls int) (bool, error) { return false, broken }, broken.Error(), 0},
		"it is never done":   {func(int) (bool, error) { return false, nil }, "not all wait after 1m0s", time.Minute},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, calls, text := time.Now(), 0, ""
				err := until(time.Second, "not all wait", func() (bool, error) {
					calls++
					return c.done(calls)
				})
				if err != nil {
					text = err.Error()
				}
				if took := time.Since(began); text != c.err || took != c.took {
					t.Errorf("%q after %v, want %q after %v", text, took, c.err, c.took)
				}
			})
		})
	}
}
