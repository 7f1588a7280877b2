// Command picture draws what Jaeger returned for two traces with a link between them.
//
//	go run . --save testdata/trace.json
//	go run ./picture <testdata/trace.json >../../docs/trace.svg
package main

import (
	"fmt"
	"io"
	"os"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "picture:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	text, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	svg, err := draw(text)
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, svg)
	return err
}
