package main

import (
	"context"
	"database/sql"
	"errors"
	"testing"
)

// sellOne is what docs/fencing.md shows.
func sellOne(ctx context.Context, db *sql.DB, item string, token uint64) error {
	var stock int64
	err := db.QueryRowContext(ctx, `UPDATE item SET token = $2 WHERE id = $1 AND token < $2 RETURNING stock`, item, token).Scan(&stock)
	if errors.Is(err, sql.ErrNoRows) {
		return errStale
	} else if err != nil {
		return err
	}
	result, err := db.ExecContext(ctx, `UPDATE item SET stock = $3 WHERE id = $1 AND token = $2`, item, token, stock-1)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n != 1 {
		return errors.Join(err, errStale)
	}
	return nil
}

func TestTheCodeOfTheFencingPageSellsOnlyToGreaterTokens(t *testing.T) {
	db := newFixture(t).db
	if err := (store{db}).open(t.Context(), item, 10); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		token uint64
		want  error
	}{{7, nil}, {8, nil}, {7, errStale}, {8, errStale}} {
		if err := sellOne(t.Context(), db, item, c.token); !errors.Is(err, c.want) {
			t.Errorf("token %d: %v", c.token, err)
		}
	}
	if left, _, err := (store{db}).count(t.Context(), item); err != nil || left != 8 {
		t.Errorf("%d left, %v", left, err)
	}
}
