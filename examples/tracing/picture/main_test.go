package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

// The picture in the documentation is what the program draws from the answer beside it.
func TestThePictureIsDrawnFromTheAnswerThatWasKept(t *testing.T) {
	answer, err := os.Open("../testdata/trace.json")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Close()
	var svg strings.Builder
	if err := run(answer, &svg); err != nil {
		t.Fatal(err)
	}
	kept, err := os.ReadFile("../../../docs/trace.svg")
	if err != nil {
		t.Fatal(err)
	}
	if svg.String() != string(kept) {
		t.Error("docs/trace.svg is another one: in examples/tracing run go run ./picture <testdata/trace.json >../../docs/trace.svg")
	}
	for _, want := range []string{"leased.wait", "leased.hold", "link</text>", "answer of Jaeger’s API"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("the picture lacks %q", want)
		}
	}
	in := xml.NewDecoder(strings.NewReader(svg.String()))
	for {
		if _, err := in.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the picture is not XML: %v", err)
		}
	}
}

func TestAnAnswerWithoutALinkIsRefused(t *testing.T) {
	for _, answer := range []string{``, `{}`, `{"data":[]}`, `{"data":null,"errors":[{"msg":"trace not found"}]}`} {
		var svg strings.Builder
		if err := run(strings.NewReader(answer), &svg); err == nil || svg.Len() > 0 {
			t.Errorf("%q: got error %v and %d bytes", answer, err, svg.Len())
		}
	}
}
