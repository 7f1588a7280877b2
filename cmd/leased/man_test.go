package main

import (
	"io"
	"os"
	"strings"
	"testing"
)

func TestTheManualPageIsThatOfTheCommands(t *testing.T) {
	const file = "../../docs/leased.1"
	page := manual(newRoot(streams{strings.NewReader(""), io.Discard, io.Discard}))
	if *updateFiles {
		if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(kept) != page {
		t.Errorf("%s is not of these commands: go test ./cmd/leased -run Manual -update", file)
	}
	if strings.Contains(page, workerCommand) || strings.Contains(page, guardName) {
		t.Error("the page tells of commands that are not for people")
	}
}
