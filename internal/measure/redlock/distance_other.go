//go:build !linux

package main

import (
	"errors"
	"time"
)

// delay needs Linux, whose kernel wakes a thread up to the microsecond.
func delay([]string, []time.Duration, func([]string) error) error {
	return errors.New("a distance to the servers needs Linux")
}
