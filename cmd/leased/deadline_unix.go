//go:build unix

package main

import (
	"fmt"
	"time"
)

// reading is what the clocks show that the guard shares with the process that holds the lease, in
// nanoseconds.
type reading struct {
	boot int64 // see bootClock; the same as wall on systems without that clock
	wall int64 // since 1970
}

func readClocks() reading {
	now := reading{wall: time.Now().UnixNano()}
	var ok bool
	if now.boot, ok = bootClock(); !ok {
		now.boot = now.wall
	}
	return now
}

// deadline is when the guard kills the command, by either clock.
//
// When it has passed by the boot clock, the guard kills at once. That clock counts the time during which
// the machine sleeps, so on a physical machine it is enough. A virtual machine whose host stops it,
// together with all of its clocks, learns of the time that has passed only when its wall clock is set. But
// a wall clock may also be set although no time has passed, and then the lease is as good as before. So
// when the deadline has passed by the wall clock alone, the guard waits for wallPatience. In that time the
// process that holds the lease, unless it is stopped, asks Redis, and either sends another deadline or ends
// the command itself.
type deadline reading

// wallPatience is longer than the process that holds the lease takes to look (lookEvery) and to ask
// (askTime).
const wallPatience = 2 * time.Second

// deadlineAt returns t as a deadline. now and clocks were read just now, from time.Now and by readClocks.
// The machine may have slept since t was computed, so of the monotonic clock and the wall clock, the one by
// which less time is left counts.
func deadlineAt(t, now time.Time, clocks reading) deadline {
	left := min(t.Sub(now), time.Duration(t.UnixNano()-now.UnixNano()))
	return deadline{boot: clocks.boot + int64(left), wall: t.UnixNano()}
}

func parseDeadline(line string) (d deadline, err error) {
	_, err = fmt.Sscanf(line, "%d %d", &d.boot, &d.wall)
	return d, err
}

func (d deadline) String() string { return fmt.Sprintf("%d %d", d.boot, d.wall) }

func (d deadline) passed(now reading) bool       { return now.boot > d.boot }
func (d deadline) passedOnWall(now reading) bool { return now.wall > d.wall }

// vigil is what the guard goes by.
type vigil struct {
	until deadline
	past  int64 // when until was first seen to have passed by the wall clock, on the boot clock; 0 if it has not
}

// isOver reports whether the guard kills the command now.
func (v *vigil) isOver(now reading) bool {
	switch {
	case v.until.passed(now):
		return true
	case !v.until.passedOnWall(now):
		v.past = 0
	case v.past == 0:
		v.past = now.boot
	}
	return v.past != 0 && now.boot-v.past > int64(wallPatience)
}
