package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"
)

// screen prints lines and a progress line. On a terminal the progress line is rewritten in
// place; elsewhere it is printed again once a second. Only one goroutine may use a screen.
type screen struct {
	out   io.Writer
	live  bool      // out is a terminal
	color bool      // out shows colors
	shown int       // width of the progress line on display
	next  time.Time // when progress is due again
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out}
	s.live = isTerminal(out) && os.Getenv("TERM") != "dumb"
	// Older Windows consoles print escape sequences as text.
	s.color = s.live && os.Getenv("NO_COLOR") == "" && runtime.GOOS != "windows"
	if !s.live {
		s.next = time.Now().Add(time.Second) // short work shows no progress
	}
	return s
}

// line prints a line that stays, in place of the progress line. On a terminal that is narrower than
// the line, it breaks the line at spaces and keeps its indentation.
func (s *screen) line(format string, args ...any) {
	s.wipe()
	text := fmt.Sprintf(format, args...)
	width := widthOf(s.out)
	if !s.live || columns(bareOfColor(text)) <= width {
		fmt.Fprintln(s.out, text)
		return
	}
	plain := strings.TrimLeft(text, " ")
	indent := text[:len(text)-len(plain)]
	for _, line := range wrapColored(plain, max(width-len(indent), 20)) {
		fmt.Fprintln(s.out, indent+line)
	}
}

// bareOfColor removes the colors that paint adds.
func bareOfColor(text string) string {
	for {
		before, rest, found := strings.Cut(text, "\x1b[")
		if !found {
			return text
		}
		_, after, _ := strings.Cut(rest, "m")
		text = before + after
	}
}

// wrapColored is wrap for text with colors, which take up no columns. If a line ends in a color,
// the color continues in the next line by itself, because terminals do that.
func wrapColored(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case columns(bareOfColor(line))+1+columns(bareOfColor(word)) <= width:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	return append(lines, line)
}

func (s *screen) wipe() {
	if s.shown > 0 {
		fmt.Fprintf(s.out, "\r%s\r", strings.Repeat(" ", s.shown))
		s.shown = 0
	}
}

// progress prints the progress line, unless it was printed too recently.
func (s *screen) progress(format string, args ...any) {
	now := time.Now()
	if now.Before(s.next) {
		return
	}
	text := fmt.Sprintf(format, args...)
	if !s.live {
		s.next = now.Add(time.Second)
		fmt.Fprintln(s.out, text)
		return
	}
	s.next = now.Add(40 * time.Millisecond)
	text = cut(text, widthOf(s.out)-1) // a line that wraps cannot be rewritten
	width := columns(text)
	fmt.Fprintf(s.out, "\r%s%s", text, strings.Repeat(" ", max(0, s.shown-width)))
	s.shown = width
}

// beat gives a person time to read what was printed last. It returns at once if out is not
// a terminal.
func (s *screen) beat(ctx context.Context) {
	if s.live {
		pause(ctx, 1200*time.Millisecond)
	}
}

func (s *screen) bold(text string) string  { return s.paint("1", text) }
func (s *screen) good(text string) string  { return s.paint("1;32", text) }
func (s *screen) bad(text string) string   { return s.paint("1;31", text) }
func (s *screen) faint(text string) string { return s.paint("2", text) }

func (s *screen) paint(code, text string) string {
	if !s.color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
