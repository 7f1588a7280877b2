package main

import (
	"bytes"
	"testing"
	"time"
)

func TestOnATerminalTheProgressLineIsRewrittenAndWipedInTheEnd(t *testing.T) {
	var out bytes.Buffer
	s := &screen{out: &out, live: true}
	s.progress("long line")
	s.progress("too soon")
	s.next = time.Time{}
	s.progress("short")
	s.line("end")
	if want := "\rlong line" + "\rshort    " + "\r     \r" + "end\n"; out.String() != want {
		t.Fatalf("printed %q, want %q", out.String(), want)
	}
}

func TestElsewhereProgressIsAFewPlainLines(t *testing.T) {
	var out bytes.Buffer
	s := newScreen(&out)
	s.progress("too soon")
	s.next = time.Time{}
	s.progress("a second later")
	s.progress("too soon again")
	s.line("%s", s.good("end"))
	if want := "a second later\nend\n"; out.String() != want {
		t.Fatalf("printed %q, want %q", out.String(), want)
	}
}
