package main

import (
	"strings"
	"testing"
	"time"
)

// honest is a sale of 3 pieces by two processes to four buyers.
func honest() *sale {
	return &sale{stock: 3, left: 0, buyers: 4, parts: []part{
		{process: 1, sold: []message{{Kind: sold, Seen: 3, Token: 10}, {Kind: sold, Seen: 1, Token: 30}}},
		{process: 2, sold: []message{{Kind: sold, Seen: 2, Token: 20}}, refused: 1},
	}}
}

func TestAnHonestSaleIsAccepted(t *testing.T) {
	if err := honest().verdict(); err != nil {
		t.Fatal(err)
	}

	killed := honest()
	killed.parts[1].refused = 0
	killed.killed = &killRecord{process: 2}
	if err := killed.verdict(); err != nil {
		t.Errorf("a buyer who died with its process: %v", err)
	}

	plenty := &sale{stock: 5, left: 4, buyers: 1, parts: []part{{process: 1, sold: []message{{Seen: 5, Token: 1}}}}}
	if err := plenty.verdict(); err != nil {
		t.Errorf("more pieces than buyers: %v", err)
	}
}

func TestAWrongSaleEndsWithStatusOne(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*sale)
		want   string
	}{
		{"one too many", func(s *sale) {
			s.parts[1].refused = 0
			s.parts[1].sold = append(s.parts[1].sold, message{Seen: 1, Token: 40})
		}, "4 were sold from a stock of 3"},
		{"one too few", func(s *sale) { s.parts[1].refused, s.parts[1].sold = 2, nil }, "2 were sold from a stock of 3"},
		{"stock not written", func(s *sale) { s.left = 1 }, "Redis says 1 are left"},
		{"a buyer without an answer", func(s *sale) { s.parts[1].refused = 0 }, "1 of 4 buyers got no answer"},
		{"a buyer with two answers", func(s *sale) { s.parts[1].refused = 2 }, "more than the 4 buyers"},
		{"one piece sold twice", func(s *sale) { s.parts[0].sold[1].Seen = 2 }, "buyer number 3 saw a stock of 2"},
		{"token twice", func(s *sale) { s.parts[0].sold[1].Token = 20 }, "token 20 after 20"},
		{"tokens out of order", func(s *sale) { s.parts[1].sold[0].Token = 5 }, "token 5 after 10"},
		{"no token", func(s *sale) { s.parts[0].sold[0].Token = 0 }, "token 0 after 0"},
	} {
		s := honest()
		c.change(s)
		err := s.verdict()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: the verdict is %v, want one with %q", c.name, err, c.want)
			continue
		}
		var said shared
		d := &demo{screen: newScreen(&said)}
		std := discard()
		std.err = &said
		if status := conclude(std, d.withLock(s)); status != 1 || strings.Count(said.String(), c.want) != 1 {
			t.Errorf("%s: status %d, said %q", c.name, status, said.String())
		}
	}
}

func TestOnlyAGreaterTokenIsTheNextSaleAfterAKilling(t *testing.T) {
	s := newSale(10, 2, 5)
	s.killed = &killRecord{process: 1, token: 50, at: time.Now().Add(-time.Second)}
	s.add(2, message{Kind: sold, Token: 49}) // was under way when the process died
	if s.killed.next != 0 {
		t.Fatal("a sale before the killed lease counts as the next one")
	}
	s.add(2, message{Kind: sold, Token: 51})
	first := s.killed.next
	if first < time.Second {
		t.Fatalf("next sale after %v, a second passed at least", first)
	}
	s.add(2, message{Kind: sold, Token: 52})
	if s.killed.next != first {
		t.Fatal("a later sale counts as the next one")
	}
}

func TestAQuantileIsTheSmallestWaitThatEnoughDidNotExceed(t *testing.T) {
	var waits []time.Duration
	for i := range 100 {
		waits = append(waits, time.Duration(100-i))
	}
	for _, c := range []struct {
		waits []time.Duration
		q     float64
		want  time.Duration
	}{
		{waits, 0.50, 50}, {waits, 0.99, 99}, {waits, 1, 100}, {waits, 0, 1},
		{waits[:1], 0.50, 100}, {waits[:3], 0.99, 100}, {nil, 0.50, 0},
	} {
		if got := quantile(c.waits, c.q); got != c.want {
			t.Errorf("quantile %v of %d waits is %d, want %d", c.q, len(c.waits), got, c.want)
		}
	}
	if waits[0] != 100 {
		t.Error("quantile sorted its caller's slice")
	}
}
