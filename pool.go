package leased

import (
	"slices"
	"sync"
	"time"

	"github.com/leasedmutex/leased/internal/redisserver"
)

// poolCheck looks after connections that have fallen silent while the server answers on new ones; see
// internal/redisserver/silent.go. It looks once a command has had no answer, and not again for a
// while: thousands of processes may do so at once when a server was frozen. A quorum looks after each of
// its servers itself.
type poolCheck struct {
	client *Client
	server *redisserver.Server

	mu      sync.Mutex // guards what follows; only group.mu is locked under it
	running bool
	looked  time.Time // when it last ended
	keys    []string  // of locks whose commands have had no answer since it last looked
}

const (
	poolCheckEvery = 2 * time.Second
	// poolCheckGathers is for how long further keys are gathered. They stand for the masters of a Cluster, whose
	// renewals have no answer at the same time.
	poolCheckGathers = 100 * time.Millisecond
	mostSilentKeys   = 64
)

// hadNoAnswer is called when a command about the key has had no answer in time.
func (p *poolCheck) hadNoAnswer(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running {
		if len(p.keys) < mostSilentKeys && !slices.Contains(p.keys, key) {
			p.keys = append(p.keys, key)
		}
		return
	}
	if !p.looked.IsZero() && time.Since(p.looked) < poolCheckEvery {
		return
	}
	p.keys = []string{key}
	p.running = p.client.group.start(p.run)
}

// run is a goroutine owned by the client, ended when it has looked, and waited for by Shutdown.
func (p *poolCheck) run() {
	unlabeled()
	c := p.client
	defer func() {
		p.mu.Lock()
		p.running, p.keys, p.looked = false, nil, time.Now()
		p.mu.Unlock()
	}()
	defer c.recoverPanic("the Dialer or OnConnect of the Redis client")
	timer := time.NewTimer(poolCheckGathers)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.base.Done():
		return
	}
	p.mu.Lock()
	keys := p.keys
	p.keys = nil
	p.mu.Unlock()
	if silent := p.server.DropSilent(c.base, keys...); silent > 0 {
		c.log.silentConnections(silent)
	}
}
