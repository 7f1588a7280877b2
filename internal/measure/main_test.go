package main

import "testing"

func TestASectionThatDoesNotExistIsRefused(t *testing.T) {
	for only, want := range map[string]int{"": len(sections), "many,cycle": 2, "cycles": -1, "cycle,": -1, "cycle, many": -1} {
		some, err := chosen(only)
		got := len(some)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("-only %q: %d sections, %v", only, got, err)
		}
	}
	if some, _ := chosen("many,cycle"); some[0].name != "cycle" {
		t.Errorf("%s is run first", some[0].name)
	}
}
