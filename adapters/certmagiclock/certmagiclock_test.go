package certmagiclock_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/leasedmutex/leased"
	"github.com/leasedmutex/leased/adapters/certmagiclock"
	"github.com/leasedmutex/leased/leasedtest"
)

const name = "issue_cert_*.example.com"

// inTwoProcesses runs f in virtual time with the storages of two processes.
func inTwoProcesses(t *testing.T, f func(t *testing.T, server *leasedtest.Server, here, there *certmagiclock.Storage)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		server := leasedtest.NewServer(t)
		files := &certmagic.FileStorage{Path: dir}
		f(t, server, certmagiclock.New(files, server.Client()), certmagiclock.New(files, server.Client()))
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestLockBlocksUntilTheNamedLockIsReleased(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, _ *leasedtest.Server, here, there *certmagiclock.Storage) {
		must(t, here.Lock(t.Context(), name))
		locked := make(chan error, 1)
		go func() { locked <- there.Lock(t.Context(), name) }()
		time.Sleep(time.Hour) // longer than any TTL
		synctest.Wait()
		select {
		case err := <-locked:
			t.Fatalf("it did not block, and returned %v", err)
		default:
		}
		must(t, here.Lock(t.Context(), "another name"))
		must(t, here.Unlock(t.Context(), "another name"))
		must(t, here.Unlock(t.Context(), name))
		must(t, <-locked)
		must(t, there.Unlock(t.Context(), name))
	})
}

func TestLockOfAProcessThatDiedBecomesStale(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, server *leasedtest.Server, _, there *certmagiclock.Storage) {
		client := server.Client(leased.WithTTL(30 * time.Second))
		dead := certmagiclock.New(nil, client)
		must(t, dead.Lock(t.Context(), name))
		if err := client.Close(); err == nil {
			t.Error("Close says nothing of the lock that is left")
		}
		began := time.Now()
		must(t, there.Lock(t.Context(), name))
		if took := time.Since(began); took > 31*time.Second {
			t.Errorf("it took %v", took)
		}
		must(t, there.Unlock(t.Context(), name))
	})
}

func TestLockHonorsTheEndOfItsContext(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, _ *leasedtest.Server, here, there *certmagiclock.Storage) {
		must(t, here.Lock(t.Context(), name))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := there.Lock(ctx, name); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it returned %v", err)
		}
		if err := there.Unlock(t.Context(), name); !errors.Is(err, leased.ErrNotLocked) {
			t.Errorf("Unlock after that returned %v, want ErrNotLocked", err)
		}
		must(t, here.Unlock(t.Context(), name))
	})
}

func TestTryLockDoesNotWait(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, server *leasedtest.Server, here, there *certmagiclock.Storage) {
		if ok, err := here.TryLock(t.Context(), name); !ok || err != nil {
			t.Fatalf("of a free lock it returned %v, %v", ok, err)
		}
		if ok, err := there.TryLock(t.Context(), name); ok || err != nil {
			t.Errorf("of a lock that is taken it returned %v, %v", ok, err)
		}
		time.Sleep(time.Hour)
		must(t, here.Unlock(t.Context(), name))
		defer server.Stop()()
		if ok, err := there.TryLock(t.Context(), name); ok || err == nil {
			t.Errorf("without a server it returned %v, %v", ok, err)
		}
	})
}

func TestUnlockOfALockThatWasLostHasNothingToRelease(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, server *leasedtest.Server, here, _ *certmagiclock.Storage) {
		must(t, here.Lock(t.Context(), name))
		leasedtest.Lose(t, server.Client(), name)
		synctest.Wait()
		must(t, here.Unlock(t.Context(), name))
		must(t, here.Lock(t.Context(), name))
		must(t, here.Unlock(t.Context(), name))
	})
}

// secretive is a storage that does not print its password.
type secretive struct {
	certmagic.Storage
	Password string
}

func (secretive) String() string { return "a storage" }

func TestTheStoragesSecretsAreNotLogged(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, server *leasedtest.Server, here, _ *certmagiclock.Storage) {
		hidden := certmagiclock.New(secretive{here, "hush"}, server.Client())
		var out bytes.Buffer
		log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&out), zap.DebugLevel))
		must(t, certmagic.CleanStorage(t.Context(), hidden, certmagic.CleanStorageOptions{Logger: log, InstanceID: "x"}))
		log.Info("as certmagic logs it", zap.Any("storage", hidden), zap.Any("plain", certmagiclock.New(struct{ certmagic.Storage }{here}, server.Client())))
		if text := out.String(); strings.Contains(text, "hush") || !strings.Contains(text, `"storage":"a storage"`) || !strings.Contains(text, `"plain":"struct { certmagic.Storage }"`) {
			t.Error(text)
		}
	})
}

// authority issues certificates and counts them.
type authority struct {
	key    *ecdsa.PrivateKey
	issued atomic.Int32
}

func (a *authority) IssuerKey() string { return "test" }

func (a *authority) Issue(_ context.Context, csr *x509.CertificateRequest) (*certmagic.IssuedCertificate, error) {
	a.issued.Add(1)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: csr.DNSNames,
		NotBefore: time.Now(), NotAfter: time.Now().Add(90 * 24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, csr.PublicKey, a.key)
	return &certmagic.IssuedCertificate{Certificate: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, err
}

// What certmagic has locks for: of several processes that need a certificate, one orders
// it, and the others find it.
func TestSeveralProcessesOrderACertificateOnce(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	ca := &authority{key: key}
	server, dir := leasedtest.NewServer(t), t.TempDir()
	var processes sync.WaitGroup
	for range 5 {
		storage := certmagiclock.New(&certmagic.FileStorage{Path: dir}, server.Client())
		cache := certmagic.NewCache(certmagic.CacheOptions{
			GetConfigForCert: func(certmagic.Certificate) (*certmagic.Config, error) { return nil, errors.New("none") },
		})
		t.Cleanup(cache.Stop)
		config := certmagic.New(cache, certmagic.Config{Storage: storage, Issuers: []certmagic.Issuer{ca}})
		processes.Go(func() {
			if err := config.ObtainCertSync(t.Context(), "example.com"); err != nil {
				t.Error(err)
			}
			if !storage.Exists(t.Context(), certmagic.StorageKeys.SiteCert("test", "example.com")) {
				t.Error("it has no certificate")
			}
		})
	}
	processes.Wait()
	if n := ca.issued.Load(); n != 1 {
		t.Errorf("%d certificates were ordered", n)
	}
}

// certmagic gives a context that never ends.
func TestUnlockDoesNotWaitForASilentServer(t *testing.T) {
	inTwoProcesses(t, func(t *testing.T, server *leasedtest.Server, here, _ *certmagiclock.Storage) {
		must(t, here.Lock(t.Context(), name))
		start := server.Stop()
		began := time.Now()
		if err := here.Unlock(context.WithoutCancel(t.Context()), name); !errors.Is(err, leased.ErrNotReleased) {
			t.Errorf("it returned %v", err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("it took %v", took)
		}
		start()
		time.Sleep(time.Minute) // the release is repeated
	})
}
