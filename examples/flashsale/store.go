package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
)

// store is the stock and the orders, in PostgreSQL.
type store struct{ db *sql.DB }

const schema = `
CREATE TABLE item (
	id    text PRIMARY KEY,
	stock bigint NOT NULL,
	token bigint NOT NULL DEFAULT 0 -- the greatest that a lease has presented
);
CREATE TABLE sale (
	buyer text PRIMARY KEY, -- a buyer who asks again is not sold a second piece
	item  text NOT NULL
);`

// recipe says how an item is read and written under a lease, and which of the values are the
// parameters of the two statements.
type recipe struct {
	read, write         string
	readWith, writeWith func(values) []any
}

// values are what a statement can use: the item, the lease's token, the stock that is written,
// and the one that was read.
type values struct {
	item        string
	token       uint64
	stock, seen int64
}

// recipes has what to do (first-access, as-read) and what not to do.
var recipes = map[string]recipe{
	"first-access": {
		// The first access presents the token and reads. No row: another lease was here,
		// this one has presented its token before, or there is no such item.
		read: `
			UPDATE item SET token = $2 WHERE id = $1 AND token < $2 RETURNING stock
		`,
		// The write is made under that token only. No row: another lease was here since.
		write: `
			UPDATE item SET stock = $3 WHERE id = $1 AND token = $2
		`,
		readWith:  func(v values) []any { return []any{v.item, v.token} },
		writeWith: func(v values) []any { return []any{v.item, v.token, v.stock} },
	},
	"as-read": {
		// No token: the write is conditional on the row as it was read.
		read: `
			SELECT stock FROM item WHERE id = $1
		`,
		write: `
			UPDATE item SET stock = $2 WHERE id = $1 AND stock = $3
		`,
		readWith:  func(v values) []any { return []any{v.item} },
		writeWith: func(v values) []any { return []any{v.item, v.stock, v.seen} },
	},
	"write-only": {
		// Wrong: the read presents nothing, and the write accepts any token that is not older.
		read: `
			SELECT stock FROM item WHERE id = $1
		`,
		write: `
			UPDATE item SET stock = $3, token = $2 WHERE id = $1 AND token <= $2
		`,
		readWith:  func(v values) []any { return []any{v.item} },
		writeWith: func(v values) []any { return []any{v.item, v.token, v.stock} },
	},
	"none": {
		// Wrong: whoever believes that it holds the lock may write.
		read: `
			SELECT stock FROM item WHERE id = $1
		`,
		write: `
			UPDATE item SET stock = $2 WHERE id = $1
		`,
		readWith:  func(v values) []any { return []any{v.item} },
		writeWith: func(v values) []any { return []any{v.item, v.stock} },
	},
}

var (
	errStale   = errors.New("another lease was here")
	errSoldOut = errors.New("sold out")
)

// read is the first access to the item under a lease.
func (s store) read(ctx context.Context, how, item string, token uint64) (stock int64, err error) {
	r := recipes[how]
	err = s.db.QueryRowContext(ctx, r.read, r.readWith(values{item: item, token: token})...).Scan(&stock)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("read with token %d: %w", token, errStale)
	}
	return stock, err
}

// sell writes one piece less than was seen, and who bought it: both or neither.
func (s store) sell(ctx context.Context, how, item string, token uint64, seen int64, buyer string) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing, and before it there is an error already
	r := recipes[how]
	result, err := tx.ExecContext(ctx, r.write, r.writeWith(values{item: item, token: token, stock: seen - 1, seen: seen})...)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n != 1 {
		return errors.Join(err, fmt.Errorf("write with token %d: %w", token, errStale))
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO sale (buyer, item) VALUES ($1, $2)`, buyer, item); err != nil {
		return err
	}
	return tx.Commit()
}

// bought reports whether the buyer has got a piece already: by a request, say, whose
// answer was lost.
func (s store) bought(ctx context.Context, buyer string) (bool, error) {
	var n int
	err := s.db.QueryRowContext(ctx, `SELECT count(*) FROM sale WHERE buyer = $1`, buyer).Scan(&n)
	return n > 0, err
}

// count returns how many pieces of the item are left, and how many were sold.
func (s store) count(ctx context.Context, item string) (left, sold int, err error) {
	err = s.db.QueryRowContext(ctx, `SELECT stock, (SELECT count(*) FROM sale WHERE item = $1) FROM item WHERE id = $1`,
		item).Scan(&left, &sold)
	return left, sold, err
}

// recreate makes the tables anew, so that earlier sales are gone, and puts n pieces of the item in stock.
func (s store) recreate(ctx context.Context, item string, n int) error {
	for _, do := range []string{`DROP TABLE IF EXISTS item, sale`, schema} {
		if _, err := s.db.ExecContext(ctx, do); err != nil {
			return err
		}
	}
	_, err := s.db.ExecContext(ctx, `INSERT INTO item (id, stock) VALUES ($1, $2)`, item, n)
	return err
}
