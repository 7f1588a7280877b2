//go:build unix

package gooselock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"testing/fstest"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/pressly/goose/v3/lock/locktesting"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/gooselock"
	"github.com/leasedmutex/leased/internal/dbtest"
	"github.com/leasedmutex/leased/leasedtest"
)

// database returns a real PostgreSQL.
func database(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dbtest.Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// migrations fail if two apply them at once, or one applies them twice.
func migrations() fstest.MapFS {
	files := fstest.MapFS{}
	for i := range 5 {
		files[fmt.Sprintf("%05d_step.sql", i+1)] = &fstest.MapFile{Data: fmt.Appendf(nil,
			"-- +goose Up\nCREATE TABLE step%d (n int);\nSELECT pg_sleep(0.02);\n-- +goose Down\nDROP TABLE step%d;\n", i, i)}
	}
	return files
}

func provider(t *testing.T, db *sql.DB, option goose.ProviderOption) *goose.Provider {
	t.Helper()
	p, err := goose.NewProvider(goose.DialectPostgres, db, migrations(), option)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The test of goose for providers with a lock.
func TestOneProviderOfSeveralAppliesTheMigrations(t *testing.T) {
	for name, option := range map[string]func(*gooselock.Locker) goose.ProviderOption{
		"session locker": func(l *gooselock.Locker) goose.ProviderOption { return goose.WithSessionLocker(l) },
		"locker":         func(l *gooselock.Locker) goose.ProviderOption { return goose.WithLocker(l) },
	} {
		t.Run(name, func(t *testing.T) {
			server, db := leasedtest.NewServer(t), database(t)
			locktesting.TestProviderLocking(t, func(t *testing.T) *goose.Provider {
				t.Helper()
				return provider(t, db, option(gooselock.New(server.Client().Mutex("migrations"))))
			})
		})
	}
}

// The test of goose for lockers. It unlocks by a context that has ended, as a process does
// that is told to end.
func TestOneLockerOfSeveralGetsTheLock(t *testing.T) {
	server := leasedtest.NewServer(t)
	locktesting.TestConcurrentLocking(t, new(sql.DB), func(t *testing.T) lock.Locker {
		t.Helper()
		return gooselock.New(server.Client().Mutex("migrations"))
	}, 200*time.Millisecond)
}

// losing loses its lock as soon as it has it.
type losing struct {
	lock.SessionLocker
	lose func()
}

func (l losing) SessionLock(ctx context.Context, conn *sql.Conn) error {
	err := l.SessionLocker.SessionLock(ctx, conn)
	if err == nil {
		l.lose()
	}
	return err
}

func TestUpSaysThatTheLockWasLost(t *testing.T) {
	server, db := leasedtest.NewServer(t), database(t)
	client := server.Client()
	locker := losing{gooselock.New(client.Mutex("migrations")), func() { leasedtest.Lose(t, client, "migrations") }}
	p := provider(t, db, goose.WithSessionLocker(locker))
	if _, err := p.Up(t.Context()); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("it returned %v, want ErrLeaseLost", err)
	}
}

func TestUnlockWithoutALockIsAnError(t *testing.T) {
	l := gooselock.New(leasedtest.New(t).Mutex("migrations"))
	if err := l.SessionUnlock(t.Context(), new(sql.Conn)); !errors.Is(err, leased.ErrNotLocked) {
		t.Errorf("it returned %v, want ErrNotLocked", err)
	}
}
