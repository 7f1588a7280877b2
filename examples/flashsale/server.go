package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/leasedmutex/leased"
)

// shop is one of the HTTP servers that sell the item.
type shop struct {
	locks  *leased.Client
	stock  store
	how    string        // the recipe
	think  time.Duration // between reading and writing
	pause  string        // URL that is asked between reading and writing, "" for none
	answer time.Duration // how long a buyer waits
}

func (s *shop) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /buy", s.serveBuy)
	return mux
}

// serveBuy answers 200 if the buyer has a piece, 410 if none is left, and 503 if it
// should ask again.
func (s *shop) serveBuy(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), s.answer)
	defer cancel()
	switch err := s.buy(ctx, r.FormValue("buyer")); {
	case err == nil:
		fmt.Fprintln(w, "sold")
	case errors.Is(err, errSoldOut):
		http.Error(w, "sold out", http.StatusGone)
	default:
		log.Print(err) // which may name servers and users: not for the buyer
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	}
}

const item = "ticket"

// buy sells one piece to the buyer, once. What it does with the token is its recipe's.
func (s *shop) buy(ctx context.Context, buyer string) (err error) {
	if done, err := s.stock.bought(ctx, buyer); err != nil || done {
		return err
	}
	lease, err := s.locks.Mutex("stock:" + item).LockContext(ctx)
	if err != nil {
		return err
	}
	sold := false
	defer func() {
		// Once the sale is written it holds, whatever became of the lease. Else the
		// error may be the only sign that another was inside.
		if e := lease.Unlock(); !sold {
			err = errors.Join(err, e)
		}
	}()
	work, cancel := lease.With(ctx) // ends with the request or with the lease
	defer cancel()

	seen, err := s.stock.read(work, s.how, item, lease.Token())
	if err != nil {
		return err
	}
	if seen == 0 {
		return errSoldOut
	}
	if err := s.decide(work, buyer); err != nil {
		return err
	}
	if err := s.stock.sell(work, s.how, item, lease.Token(), seen, buyer); err != nil {
		return err
	}
	sold = true
	return nil
}

// decide stands for what takes time between a read and a write. The test has its say
// there, too.
func (s *shop) decide(ctx context.Context, buyer string) error {
	if s.pause != "" {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.pause+"?buyer="+buyer, nil)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return err
		}
		return answer.Body.Close()
	}
	timer := time.NewTimer(s.think)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
