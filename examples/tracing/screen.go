package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
	"unicode/utf8"
)

// screen prints lines, and one line about what is going on, which on a terminal
// is rewritten in place and elsewhere repeated every ten seconds. It belongs to one
// goroutine.
type screen struct {
	out  io.Writer
	live bool // out is a terminal

	shown int       // width of the progress line on display
	next  time.Time // when progress is due again
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out}
	if f, ok := out.(*os.File); ok && os.Getenv("TERM") != "dumb" {
		info, err := f.Stat()
		s.live = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	if !s.live {
		s.next = time.Now().Add(time.Second) // short work needs no progress lines
	}
	return s
}

// line prints a line for good, in place of the progress line.
func (s *screen) line(format string, args ...any) {
	s.wipe()
	fmt.Fprintf(s.out, format+"\n", args...)
}

func (s *screen) wipe() {
	if s.shown > 0 {
		fmt.Fprintf(s.out, "\r%s\r", strings.Repeat(" ", s.shown))
		s.shown = 0
	}
}

// progress tells what is going on, if it is time for that.
func (s *screen) progress(format string, args ...any) {
	now := time.Now()
	if now.Before(s.next) {
		return
	}
	text := fmt.Sprintf(format, args...)
	if !s.live {
		s.next = now.Add(10 * time.Second)
		fmt.Fprintln(s.out, text)
		return
	}
	s.next = now.Add(40 * time.Millisecond)
	width := utf8.RuneCountInString(text)
	fmt.Fprintf(s.out, "\r%s%s", text, strings.Repeat(" ", max(0, s.shown-width)))
	s.shown = width
}
