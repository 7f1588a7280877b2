//go:build unix

package migratelock_test

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	pgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/database/stub"
	contract "github.com/golang-migrate/migrate/v4/database/testing"
	"github.com/golang-migrate/migrate/v4/source/iofs"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/migratelock"
	"github.com/leasedmutex/leased/internal/dbtest"
	"github.com/leasedmutex/leased/leasedtest"
)

const wait = 10 * time.Second

func stubDriver(t *testing.T, client *leased.Client) (database.Driver, *stub.Stub) {
	t.Helper()
	inner, err := stub.WithInstance(nil, &stub.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return migratelock.New(inner, client.Mutex("migrations"), wait), inner.(*stub.Stub)
}

func postgresDriver(t *testing.T, url string, client *leased.Client) database.Driver {
	t.Helper()
	db, err := sql.Open("pgx", url)
	if err != nil {
		t.Fatal(err)
	}
	inner, err := pgx.WithInstance(db, &pgx.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return migratelock.New(inner, client.Mutex("migrations"), wait)
}

// The test of migrate that all database drivers must pass.
func TestTheContractOfDriversHolds(t *testing.T) {
	t.Run("stub", func(t *testing.T) {
		t.Parallel()
		d, _ := stubDriver(t, leasedtest.New(t))
		contract.Test(t, d, []byte("migration"))
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		d := postgresDriver(t, dbtest.Postgres(t), leasedtest.New(t))
		contract.Test(t, d, []byte("SELECT 1"))
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestSeveralProcessesMigrateOneAfterTheOther(t *testing.T) {
	files := fstest.MapFS{}
	for i := range 5 { // each fails if two apply it at once, or one applies it twice
		files[fmt.Sprintf("%d_step.up.sql", i+1)] = &fstest.MapFile{
			Data: fmt.Appendf(nil, "CREATE TABLE step%d (n int); SELECT pg_sleep(0.02);", i)}
	}
	url, server := dbtest.Postgres(t), leasedtest.NewServer(t)
	var processes sync.WaitGroup
	applied := make(chan struct{}, 5)
	for range 5 {
		source, err := iofs.New(files, ".")
		if err != nil {
			t.Fatal(err)
		}
		m, err := migrate.NewWithInstance("iofs", source, "pgx5", postgresDriver(t, url, server.Client()))
		if err != nil {
			t.Fatal(err)
		}
		processes.Go(func() {
			switch err := m.Up(); {
			case err == nil:
				applied <- struct{}{}
			case !errors.Is(err, migrate.ErrNoChange):
				t.Error(err)
			}
			if version, dirty, err := m.Version(); version != 5 || dirty || err != nil {
				t.Errorf("the version is %d, dirty %v, %v", version, dirty, err)
			}
			if a, b := m.Close(); a != nil || b != nil {
				t.Error(a, b)
			}
		})
	}
	processes.Wait()
	if n := len(applied); n != 1 {
		t.Errorf("%d processes applied migrations", n)
	}
}

// runsNoSecond fails the test unless d, whose lock was lost after the first migration, runs no other and says why.
func runsNoSecond(t *testing.T, d database.Driver, inner *stub.Stub) {
	t.Helper()
	if err := d.Run(strings.NewReader("second")); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("Run returned %v, want ErrLeaseLost", err)
	}
	if !inner.EqualSequence([]string{"first"}) {
		t.Errorf("these were run: %q", inner.MigrationSequence)
	}
	if err := d.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
		t.Errorf("Unlock returned %v, want ErrLeaseLost", err)
	}
}

func TestALockThatAnotherProcessHoldsIsRefusedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		here, _ := stubDriver(t, server.Client())
		there, _ := stubDriver(t, server.Client())
		if err := here.Lock(); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		err := there.Lock()
		if took := time.Since(began); !errors.Is(err, database.ErrLocked) || !errors.Is(err, leased.ErrNotAcquired) || took > wait+time.Second {
			t.Errorf("after %v it returned %v", took, err)
		}
		if err := there.Unlock(); !errors.Is(err, database.ErrNotLocked) {
			t.Errorf("Unlock returned %v, want ErrNotLocked", err)
		}
		if err := here.Unlock(); err != nil {
			t.Error(err)
		}
	})
}

func TestNoMigrationBeginsOnceTheLockWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		d, inner := stubDriver(t, server.Client())
		if err := d.Lock(); err != nil {
			t.Fatal(err)
		}
		if err := d.SetVersion(1, false); err != nil {
			t.Fatal(err)
		}
		if err := d.Run(strings.NewReader("first")); err != nil {
			t.Fatal(err)
		}
		leasedtest.Lose(t, server.Client(), "migrations")
		synctest.Wait()
		if err := d.Run(strings.NewReader("second")); !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("it returned %v, want ErrLeaseLost", err)
		}
		if err := d.SetVersion(2, false); !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("SetVersion returned %v, want ErrLeaseLost", err)
		}
		if err := d.Drop(); !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("Drop returned %v, want ErrLeaseLost", err)
		}
		if version, _, err := d.Version(); version != 1 || err != nil {
			t.Errorf("the version is %d, %v", version, err)
		}
		if !inner.EqualSequence([]string{"first"}) {
			t.Errorf("these were run: %q", inner.MigrationSequence)
		}
		if err := d.Unlock(); !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("Unlock returned %v, want ErrLeaseLost", err)
		}
	})
}

// The keys are deleted, and nobody is told: only Redis knows. Before each step it is asked.
func TestALossOfWhichNothingWasHeardIsNoticedBeforeTheNextStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		d, inner := stubDriver(t, server.Client())
		if err := errors.Join(d.Lock(), d.SetVersion(1, true), d.Run(strings.NewReader("first"))); err != nil {
			t.Fatal(err)
		}
		if err := server.Redis().Del(t.Context(), "migrations").Err(); err != nil {
			t.Fatal(err)
		}
		if err := d.SetVersion(1, false); !errors.Is(err, leased.ErrLeaseLost) {
			t.Errorf("SetVersion returned %v, want ErrLeaseLost", err)
		}
		if version, dirty, err := d.Version(); version != 1 || !dirty || err != nil {
			t.Errorf("the version is %d, dirty %v, %v", version, dirty, err)
		}
		runsNoSecond(t, d, inner)
	})
}

// Until the lease ends by the local clock, nobody else can have the lock.
func TestMigrationsGoOnWhileRedisCannotBeReachedUntilTheLeaseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		d, inner := stubDriver(t, server.Client())
		if err := d.Lock(); err != nil {
			t.Fatal(err)
		}
		start := server.Stop()
		defer start()
		if err := d.Run(strings.NewReader("first")); err != nil {
			t.Errorf("Run returned %v", err)
		}
		time.Sleep(30 * time.Second) // in virtual time: the TTL
		runsNoSecond(t, d, inner)
	})
}

// The driver's own lock is also taken when it is opened, which the package comment warns of.
func TestOpeningPostgresTakesALockOfItsOwn(t *testing.T) {
	db, err := sql.Open("pgx", dbtest.Postgres(t))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var name, schema string
	if err := db.QueryRowContext(t.Context(), "SELECT current_database(), current_schema()").Scan(&name, &schema); err != nil {
		t.Fatal(err)
	}
	id, err := database.GenerateAdvisoryLockId(name, schema, pgx.DefaultMigrationsTable)
	if err != nil {
		t.Fatal(err)
	}
	other, err := db.Conn(t.Context()) // like the session that a pooler left behind with a lock
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := other.ExecContext(t.Context(), "SELECT pg_advisory_lock($1)", id); err != nil {
		t.Fatal(err)
	}
	opened := make(chan error, 1)
	go func() {
		_, err := pgx.WithInstance(db, &pgx.Config{})
		opened <- err
	}()
	for waiting := 0; waiting == 0 && len(opened) == 0; time.Sleep(time.Millisecond) { // PostgreSQL has no event for it
		if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-opened:
		t.Fatalf("opened although another session has the lock: %v", err)
	default:
	}
	if _, err := other.ExecContext(t.Context(), "SELECT pg_advisory_unlock($1)", id); err != nil {
		t.Fatal(err)
	}
	if err := <-opened; err != nil {
		t.Error(err)
	}
}
