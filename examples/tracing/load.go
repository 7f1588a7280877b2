package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// sale is how the orders went.
type sale struct{ accepted, refused atomic.Int64 }

// sell fills the stock and sends all orders, from several customers of each process
// at once.
func (s *show) sell(ctx context.Context) error {
	if err := fill(ctx, s.rdb, s.prefix, item, s.options.stock); err != nil {
		return fmt.Errorf("cannot fill the stock: %w", err)
	}
	var all sale
	var next atomic.Int64
	errs := make(chan error, processes*customers)
	var group sync.WaitGroup
	for i := range processes * customers {
		// Owned by sell, ended by the last order or the first error, waited for below.
		group.Go(func() {
			for next.Add(1) <= int64(s.options.orders) {
				if err := s.services[i%processes].buy(ctx, &all); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	group.Wait()
	close(errs)
	var failed []error
	for err := range errs {
		failed = append(failed, err)
	}
	if len(failed) > 0 {
		return errors.Join(failed...)
	}
	left, err := s.rdb.HGet(ctx, stockKey(s.prefix, item), "left").Int()
	if err != nil {
		return err
	}
	s.screen.line("\n%d orders from %d customers: %d accepted, %d told %q. %d of %d are left.",
		s.options.orders, processes*customers, all.accepted.Load(), all.refused.Load(), errSoldOut, left, s.options.stock)
	if want := s.options.stock - int(all.accepted.Load()); left != want {
		return fmt.Errorf("the lock failed: %d should be left", want)
	}
	return nil
}

// buy sends one order and counts what became of it.
func (c *service) buy(ctx context.Context, all *sale) error {
	status, text, err := c.order(ctx, order{Item: item, Pieces: 1})
	switch {
	case err != nil:
		return err
	case status == http.StatusOK:
		all.accepted.Add(1)
	case status == http.StatusConflict:
		all.refused.Add(1)
	default:
		return fmt.Errorf("%s answers %d: %s", c.name, status, bytes.TrimSpace(text))
	}
	return nil
}

func (c *service) order(ctx context.Context, o order) (status int, text []byte, err error) {
	body, err := json.Marshal(o)
	if err != nil {
		return 0, nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+c.address+orderPath, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, fmt.Errorf("%s does not answer: %w", c.name, err)
	}
	defer response.Body.Close()
	text, err = io.ReadAll(io.LimitReader(response.Body, 1<<16))
	return response.StatusCode, text, err
}
