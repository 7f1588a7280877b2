//go:build unix

package main

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	_ "github.com/go-sql-driver/mysql"

	"github.com/leasedmutex/leased/internal/dbtest"
)

// readOnMySQL is the first access of docs/fencing.md without RETURNING.
func readOnMySQL(ctx context.Context, db *sql.DB, item string, token uint64) (stock int64, err error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback()
	result, err := tx.ExecContext(ctx, `UPDATE item SET token = ? WHERE id = ? AND token < ?`, token, item, token)
	if err != nil {
		return 0, err
	}
	if n, err := result.RowsAffected(); err != nil || n != 1 {
		return 0, errors.Join(err, errStale)
	}
	// The update has locked the row, so this reads what nobody else can change before the commit.
	if err := tx.QueryRowContext(ctx, `SELECT stock FROM item WHERE id = ?`, item).Scan(&stock); err != nil {
		return 0, err
	}
	return stock, tx.Commit()
}

// writeOnMySQL is the write of docs/fencing.md, for a connection with clientFoundRows=true.
func writeOnMySQL(ctx context.Context, db *sql.DB, item string, token uint64, stock int64) error {
	result, err := db.ExecContext(ctx, `UPDATE item SET stock = ? WHERE id = ? AND token = ?`, stock, item, token)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n != 1 {
		return errors.Join(err, errStale)
	}
	return nil
}

// addOnMySQL makes a row that may be missing, before the first access.
const addOnMySQL = `INSERT INTO item (id, stock, token) VALUES (?, 0, 0) ON DUPLICATE KEY UPDATE id = id`

func TestTheMySQLCodeOfTheFencingPageSellsOnlyToGreaterTokens(t *testing.T) {
	source := dbtest.MariaDB(t)
	db := openMySQL(t, source+"?clientFoundRows=true")
	sellOne := func(token uint64) error {
		stock, err := readOnMySQL(t.Context(), db, item, token)
		if err != nil {
			return err
		}
		return writeOnMySQL(t.Context(), db, item, token, stock-1)
	}

	t.Run("one after the other", func(t *testing.T) {
		stockOnMySQL(t, db, 3)
		for _, c := range []struct {
			token uint64
			want  error
			left  int64
		}{{7, nil, 2}, {8, nil, 1}, {7, errStale, 1}, {8, errStale, 1}, {9, nil, 0}} {
			if err := sellOne(c.token); !errors.Is(err, c.want) {
				t.Errorf("token %d: %v", c.token, err)
			}
			if left := leftOnMySQL(t, db); left != c.left {
				t.Errorf("after token %d %d are left, want %d", c.token, left, c.left)
			}
		}
		if _, err := readOnMySQL(t.Context(), db, "no such item", 10); !errors.Is(err, errStale) {
			t.Errorf("what is not in the table: %v", err)
		}
	})

	t.Run("two at once", func(t *testing.T) {
		stockOnMySQL(t, db, 3)
		for _, token := range []uint64{7, 8} {
			if stock, err := readOnMySQL(t.Context(), db, item, token); err != nil || stock != 3 {
				t.Fatalf("token %d reads %d, %v", token, stock, err)
			}
		}
		for _, c := range []struct {
			token uint64
			want  error
		}{{7, errStale}, {8, nil}, {7, errStale}} {
			if err := writeOnMySQL(t.Context(), db, item, c.token, 2); !errors.Is(err, c.want) {
				t.Errorf("the write with token %d: %v", c.token, err)
			}
		}
	})

	// As if every buyer believed that it had the lock.
	t.Run("many at once", func(t *testing.T) {
		const stock, buyers = 40, 16
		stockOnMySQL(t, db, stock)
		var token, sold, refused atomic.Int64
		var all sync.WaitGroup
		for range buyers {
			all.Go(func() {
				for range 5 {
					switch err := sellOne(uint64(token.Add(1))); {
					case err == nil:
						sold.Add(1)
					case errors.Is(err, errStale):
						refused.Add(1)
					default:
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		if left := leftOnMySQL(t, db); sold.Load() != stock-left {
			t.Errorf("%d of %d are left, and %d were sold", left, stock, sold.Load())
		}
		if refused.Load() == 0 {
			t.Error("no two buyers met, so this has shown nothing")
		}
	})

	t.Run("a row that is missing", func(t *testing.T) {
		stockOnMySQL(t, db, 3)
		for token := uint64(20); token < 22; token++ {
			if _, err := db.ExecContext(t.Context(), addOnMySQL, "new"); err != nil {
				t.Fatal(err)
			}
			// What the first lease has written is there for the second.
			if stock, err := readOnMySQL(t.Context(), db, "new", token); err != nil || stock != int64(token-20) {
				t.Fatalf("token %d reads %d, %v", token, stock, err)
			}
			if err := writeOnMySQL(t.Context(), db, "new", token, 1); err != nil {
				t.Fatal(err)
			}
		}
	})

	// What addOnMySQL does not do: a refusal counts one row, as a row that is made does.
	t.Run("a token in the insert", func(t *testing.T) {
		const insert = `INSERT INTO item (id, stock, token) VALUES (?, 0, ?)
			ON DUPLICATE KEY UPDATE token = IF(token < VALUES(token), VALUES(token), token)`
		stockOnMySQL(t, db, 3)
		for i, want := range []int64{1, 1, 2} {
			result, err := db.ExecContext(t.Context(), insert, "new", []int{8, 7, 9}[i])
			if err != nil {
				t.Fatal(err)
			}
			if n, err := result.RowsAffected(); err != nil || n != want {
				t.Errorf("insert %d counts %d rows, want %d: %v", i, n, want, err)
			}
		}
	})

	// Without clientFoundRows, a write that changes nothing looks like one that was refused.
	t.Run("a write of what is there", func(t *testing.T) {
		stockOnMySQL(t, db, 3)
		stock, err := readOnMySQL(t.Context(), db, item, 7)
		if err != nil {
			t.Fatal(err)
		}
		if err := writeOnMySQL(t.Context(), db, item, 7, stock); err != nil {
			t.Error(err)
		}
		if err := writeOnMySQL(t.Context(), openMySQL(t, source), item, 7, stock); !errors.Is(err, errStale) {
			t.Errorf("changed rows are counted, and the write found %v", err)
		}
	})
}

func openMySQL(t *testing.T, source string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", source)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// stockOnMySQL makes the table anew, with so many pieces of the item.
func stockOnMySQL(t *testing.T, db *sql.DB, n int) {
	t.Helper()
	for _, do := range []string{
		`DROP TABLE IF EXISTS item`,
		`CREATE TABLE item (id varchar(64) PRIMARY KEY, stock bigint NOT NULL, token bigint NOT NULL DEFAULT 0)`,
	} {
		if _, err := db.ExecContext(t.Context(), do); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.ExecContext(t.Context(), `INSERT INTO item (id, stock) VALUES (?, ?)`, item, n); err != nil {
		t.Fatal(err)
	}
}

func leftOnMySQL(t *testing.T, db *sql.DB) (stock int64) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), `SELECT stock FROM item WHERE id = ?`, item).Scan(&stock); err != nil {
		t.Fatal(err)
	}
	return stock
}
