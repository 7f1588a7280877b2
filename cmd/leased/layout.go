package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// How text is fitted to a terminal.

const usualWidth = 80

// widthOf returns how many columns out has: those of a terminal, otherwise $COLUMNS. Without either,
// what is no terminal has no bound: a program reads it, which has to find whole names.
func widthOf(out io.Writer) int {
	if f := fileOf(out); f != nil {
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			return max(width, 20)
		}
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return max(n, 20)
	}
	if isTerminal(out) { // it does not tell its size
		return usualWidth
	}
	return math.MaxInt
}

// proseWidth is widthOf for sentences, which people read wherever they go: no bound is the usual width.
func proseWidth(out io.Writer) int {
	if width := widthOf(out); width != math.MaxInt {
		return width
	}
	return usualWidth
}

// heightOf returns how many lines out has: those of a terminal, otherwise 24.
func heightOf(out io.Writer) int {
	if f := fileOf(out); f != nil {
		if _, height, err := term.GetSize(int(f.Fd())); err == nil && height > 0 {
			return height
		}
	}
	return 24
}

// fileOf returns the file that a stream is, or nil.
func fileOf(stream any) *os.File {
	if o, ok := stream.(*output); ok {
		stream = o.Writer
	}
	f, _ := stream.(*os.File)
	return f
}

func isTerminal(stream any) bool {
	f := fileOf(stream)
	return f != nil && term.IsTerminal(int(f.Fd()))
}

// wrap breaks text at spaces into lines of at most width columns. It keeps all other spaces: the text may
// have a quoted name in which several stand together.
func wrap(text string, width int) []string {
	var lines []string
	words := strings.Split(strings.TrimSpace(text), " ")
	line := words[0]
	for _, word := range words[1:] {
		if word == "" || columns(line)+1+columns(word) <= width {
			line += " " + word
			continue
		}
		lines = append(lines, line)
		line = word
	}
	return append(lines, line)
}

// hang prints text after a label, and aligns its further lines with its first.
func hang(out io.Writer, label, text string, width int) {
	indent := columns(label)
	for i, line := range wrap(text, max(width-indent, 20)) {
		if i > 0 {
			label = strings.Repeat(" ", indent)
		}
		fmt.Fprintln(out, strings.TrimRight(label+line, " "))
	}
}

// columns counts characters, because names of locks are rarely in double-width scripts.
func columns(text string) int { return utf8.RuneCountInString(text) }

// cut shortens text to width columns.
func cut(text string, width int) string {
	if columns(text) <= width {
		return text
	}
	if width < 1 {
		return ""
	}
	return string([]rune(text)[:width-1]) + "…"
}

// column is a column of a table. Columns whose cells are numbers are aligned to the right.
type column struct {
	title string
	right bool
	// least is how narrow the column may become if the table does not fit; 0 means that it keeps
	// its width. If that is not enough, columns are left out, beginning with the last one.
	least int
}

// table lays out rows as text that is width columns wide.
func table(head []column, rows [][]string, width int) []string {
	const gap = 2
	wide := make([]int, len(head))
	for i, c := range head {
		wide[i] = columns(c.title)
		for _, row := range rows {
			wide[i] = max(wide[i], columns(row[i]))
		}
	}
	total := func(n int) int {
		sum := gap * (n - 1)
		for _, w := range wide[:n] {
			sum += w
		}
		return sum
	}
	shown := len(head)
	// The widest column that may shrink is narrowed one step at a time, as long as that helps;
	// after that, a column is left out.
	for shown > 1 && total(shown) > width {
		widest := -1
		for i, c := range head[:shown] {
			if c.least > 0 && wide[i] > c.least && (widest < 0 || wide[i] > wide[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			shown--
			continue
		}
		wide[widest]--
	}
	if shown == 1 {
		wide[0] = min(wide[0], width)
	}
	line := func(cells []string) string {
		var b strings.Builder
		for i, cell := range cells[:shown] {
			cell = cut(cell, wide[i])
			pad := strings.Repeat(" ", wide[i]-columns(cell))
			if i > 0 {
				b.WriteString(strings.Repeat(" ", gap))
			}
			if head[i].right {
				b.WriteString(pad + cell)
			} else {
				b.WriteString(cell + pad)
			}
		}
		return strings.TrimRight(b.String(), " ")
	}
	titles := make([]string, len(head))
	for i, c := range head {
		titles[i] = c.title
	}
	lines := []string{line(titles)}
	for _, row := range rows {
		lines = append(lines, line(row))
	}
	return lines
}

// seconds formats durations that people wait for; milliseconds formats those that are measured.
func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }

func milliseconds(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1000) }

// instant formats a time with its zone, for use in a log or by a colleague elsewhere.
func instant(t time.Time) string { return t.Local().Format("2006-01-02 15:04:05.000 -07:00") }

// brief formats a duration in few columns.
func brief(d time.Duration) string {
	switch {
	case d < 0:
		return "never"
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%02dh", int(d.Hours())/24, int(d.Hours())%24)
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// printable quotes text that other programs wrote, if printing it unquoted would garble a terminal
// or a table.
func printable(text string) string {
	quoted := strconv.Quote(text)
	if quoted == `"`+text+`"` && !strings.ContainsAny(text, " \u00a0") && text != "" {
		return text
	}
	return quoted
}
