package lockstate

import (
	"errors"
	"time"

	"github.com/leasedmutex/leased/internal/protocol"
)

// sends fails unless that command is under way.
func (h *hand) sends(v protocol.Verb) protocol.Command {
	h.t.Helper()
	if h.flight == nil || h.flight.Verb != v {
		h.t.Fatalf("under way is %+v, not a command %d", h.flight, v)
	}
	return *h.flight
}

func (h *hand) sendsNothing() {
	h.t.Helper()
	if h.flight != nil {
		h.t.Fatalf("under way is %+v", *h.flight)
	}
}

func (h *hand) in(cs ...*Caller) {
	h.t.Helper()
	for i, c := range cs {
		if c.Phase != Inside {
			h.t.Fatalf("caller %d is not inside: phase %d, %v", i, c.Phase, c.Outcome())
		}
	}
}

func (h *hand) out(cs ...*Caller) {
	h.t.Helper()
	for i, c := range cs {
		if c.Phase != Waiting {
			h.t.Fatalf("caller %d does not wait: phase %d, %v", i, c.Phase, c.Outcome())
		}
	}
}

// turned fails unless c was turned away with err.
func (h *hand) turned(c *Caller, err error) {
	h.t.Helper()
	if c.Phase != Rejected || !errors.Is(c.Outcome(), err) {
		h.t.Fatalf("phase %d, %v, want to be turned away with %v", c.Phase, c.Outcome(), err)
	}
}

// lost fails unless these leases, and no others, ended before their Unlock.
func (h *hand) lost(cs ...*Caller) {
	h.t.Helper()
	if len(h.losses) != len(cs) {
		h.t.Fatalf("lost %v, want %d", h.losses, len(cs))
	}
	for i, c := range cs {
		if h.losses[i].Caller != c || c.Ended != ByLoss {
			h.t.Fatalf("loss %d is %+v", i, h.losses[i])
		}
	}
}

// cancels fails unless these requests, and no others, were to be canceled.
func (h *hand) cancels(ids ...string) {
	h.t.Helper()
	if len(h.unwanted) != len(ids) {
		h.t.Fatalf("cancels %+v, want %v", h.unwanted, ids)
	}
	for i, id := range ids {
		if h.unwanted[i].ID != id {
			h.t.Fatalf("cancels %s, want %s", h.unwanted[i].ID, id)
		}
	}
}

// canceled has g's cancel be answered.
func (h *hand) canceled(g Cancellation) {
	h.t.Helper()
	h.step(func(_ time.Time, fx *Effects) {
		for _, c := range g.Callers {
			c.settle(nil, fx)
		}
	})
}

// settled fails unless Unlock of c returned, with err.
func (h *hand) settled(c *Caller, err error) {
	h.t.Helper()
	if !c.Settled || c.Outcome() != err {
		h.t.Fatalf("settled %v with %v, want %v", c.Settled, c.Outcome(), err)
	}
}

func (h *hand) state(want grantState) {
	h.t.Helper()
	if h.l.grant.state != want {
		h.t.Fatalf("the grant's state is %d, want %d", h.l.grant.state, want)
	}
}

// trust fails unless the grant is believed for just so long from noon.
func (h *hand) trust(sinceNoon time.Duration) {
	h.t.Helper()
	if got := h.l.grant.trust().Sub(noon); got != sinceNoon {
		h.t.Fatalf("believed until %v, want %v", got, sinceNoon)
	}
}
