//go:build etcd

package main

import (
	"context"
	"errors"
	"net"
	"net/url"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
)

// etcd needs a hundred further packages, gRPC among them, so it takes part only on request:
// go run -tags etcd .
func init() {
	contenders = append(contenders, contender{
		name: "etcd", module: "go.etcd.io/etcd/client/v3",
		only:     []string{"cycle", "cycle-free", "cycle-names", "handoff", "handoff-free", "contend-1x64", "contend-4x16", "contend-8x1", "many"},
		settings: "package concurrency on one embedded server, whose disk is memory where the system has /dev/shm; one session a process, and a Go channel before each name, because two mutexes of one session do not exclude each other",
		open:     openEtcd,
		serve:    serveEtcd,
	})
}

func serveEtcd(dir string) (string, error) {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel = dir, "fatal"
	here := make([]url.URL, 2)
	for i := range here {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return "", err
		}
		here[i] = url.URL{Scheme: "http", Host: l.Addr().String()}
		_ = l.Close()
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = here[:1], here[:1]
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = here[1:], here[1:]
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return "", err
	}
	select {
	case <-e.Server.ReadyNotify():
		return here[0].Host, nil
	case <-time.After(20 * time.Second):
		return "", errors.New("etcd does not get ready")
	}
}

type etcdLocker struct {
	session *concurrency.Session
	mu      sync.Mutex // guards gates
	gates   map[string]chan struct{}
}

func openEtcd(s setup) (locker, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	session, err := concurrency.NewSession(client, concurrency.WithTTL(int(s.TTL.Seconds())))
	return &etcdLocker{session: session, gates: map[string]chan struct{}{}}, err
}

func (l *etcdLocker) lock(ctx context.Context, name string) (func() error, error) {
	l.mu.Lock()
	gate := l.gates[name]
	if gate == nil {
		gate = make(chan struct{}, 1)
		l.gates[name] = gate
	}
	l.mu.Unlock()
	select {
	case gate <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	m := concurrency.NewMutex(l.session, "/lock/"+name)
	if err := m.Lock(ctx); err != nil {
		<-gate
		return nil, err
	}
	return func() error {
		defer func() { <-gate }()
		return m.Unlock(context.Background())
	}, nil
}
