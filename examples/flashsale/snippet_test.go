package main

import (
	"context"
	"database/sql"
	"errors"
	"os/exec"
	"strconv"
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
	if stock == 0 {
		return errSoldOut
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
	if err := (store{db}).recreate(t.Context(), item, 2); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		token uint64
		want  error
		left  int
	}{{7, nil, 1}, {8, nil, 0}, {7, errStale, 0}, {8, errStale, 0}, {9, errSoldOut, 0}} {
		if err := sellOne(t.Context(), db, item, c.token); !errors.Is(err, c.want) {
			t.Errorf("token %d: %v", c.token, err)
		}
		if left, _, err := (store{db}).count(t.Context(), item); err != nil || left != c.left {
			t.Errorf("after token %d %d left, %v", c.token, left, err)
		}
	}
	if err := sellOne(t.Context(), db, "no such item", 10); !errors.Is(err, errStale) {
		t.Errorf("what is not in the table: %v", err)
	}
}

// firstOfAny is the first access to a row that need not exist yet, as docs/fencing.md shows it.
const firstOfAny = `
	INSERT INTO item (id, stock, token) VALUES ($1, 0, $2)
	ON CONFLICT (id) DO UPDATE SET token = $2 WHERE item.token < $2 RETURNING stock
`

func TestTheFirstAccessOfTheFencingPageMakesARowThatIsMissing(t *testing.T) {
	db := newFixture(t).db
	if err := (store{db}).recreate(t.Context(), item, 2); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		id    string
		token uint64
		want  error
		stock int64
	}{{item, 7, nil, 2}, {item, 7, sql.ErrNoRows, 0}, {"new", 8, nil, 0}, {"new", 7, sql.ErrNoRows, 0}, {"new", 9, nil, 0}} {
		var stock int64
		err := db.QueryRowContext(t.Context(), firstOfAny, c.id, c.token).Scan(&stock)
		if !errors.Is(err, c.want) || stock != c.stock {
			t.Errorf("%s with token %d: %d, %v", c.id, c.token, stock, err)
		}
	}
	// The write is the same as for any row.
	for token, want := range map[uint64]int64{8: 0, 9: 1} {
		result, err := db.ExecContext(t.Context(), recipes["first-access"].write, "new", token, 5)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := result.RowsAffected(); err != nil || n != want {
			t.Errorf("a write with token %d changed %d rows, %v", token, n, err)
		}
	}
}

// The script of docs/cli.md, for psql, which has to end with an error if the token is refused.
func TestTheScriptOfTheCommandLinePageSellsOnlyToGreaterTokens(t *testing.T) {
	psql, err := exec.LookPath("psql")
	if err != nil {
		t.Skip(err)
	}
	f := newFixture(t)
	if err := (store{f.db}).recreate(t.Context(), "7", 1); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ token, status, left int }{{5, 0, 0}, {5, 3, 0}, {4, 3, 0}, {6, 3, 0}} {
		run := exec.CommandContext(t.Context(), psql, "-X", "-v", "ON_ERROR_STOP=1", "-v", "token="+strconv.Itoa(c.token), "-f", "testdata/sell.sql", f.database)
		out, _ := run.CombinedOutput()
		if status := run.ProcessState.ExitCode(); status != c.status {
			t.Errorf("token %d: status %d, want %d: %s", c.token, status, c.status, out)
		}
		if left, _, err := (store{f.db}).count(t.Context(), "7"); err != nil || left != c.left {
			t.Errorf("after token %d %d left, %v", c.token, left, err)
		}
	}
}
