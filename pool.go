package leased

import (
	"slices"
	"sync"
	"time"

	"github.com/leasedmutex/leased/internal/lockstate"
	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redisserver"
)

// poolCheck looks after connections that have fallen silent while the server answers on new ones; see
// internal/redisserver/silent.go. It looks once commands have had no answer, and at most every two seconds:
// thousands of processes may do so at once when a server was frozen. A quorum looks after each of its
// servers itself.
type poolCheck struct {
	client *Client
	server *redisserver.Server

	roundTrip protocol.RoundTrip // of renewals

	mu      sync.Mutex // guards what follows; only group.mu is locked under it
	running bool
	looked  time.Time // when it last began to look
	keys    []string  // of locks whose commands have had no answer since then
}

const (
	// poolCheckEvery is the least time from the beginning of one look to that of the next.
	poolCheckEvery = 2 * time.Second
	// poolCheckGathers is for how long further keys are gathered. They stand for the masters of a Cluster,
	// whose renewals have no answer at the same time.
	poolCheckGathers = 100 * time.Millisecond
	// maxSilentKeys bounds the keys, and so how many masters are looked for at once.
	maxSilentKeys = 64
)

// hadNoAnswer is called when a command about the key has had no answer in time, or a renewal none for a while.
func (p *poolCheck) hadNoAnswer(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.keys) < maxSilentKeys && !slices.Contains(p.keys, key) {
		p.keys = append(p.keys, key)
	}
	if !p.running {
		p.running = p.client.group.start(p.run)
	}
}

// run is a goroutine owned by the client, ended when no more commands have had no answer, and waited for by
// Shutdown.
func (p *poolCheck) run() {
	unlabeled()
	defer p.client.recoverPanic("the Redis client, whose connections were looked at,")
	ifCutShort(func() { // by user code
		p.mu.Lock()
		p.running, p.keys = false, nil
		p.mu.Unlock()
	}, func() {
		for p.look() {
		}
	})
}

// look waits until it may look again, does so, and reports whether to go on.
func (p *poolCheck) look() (more bool) {
	c := p.client
	p.mu.Lock()
	pause := max(poolCheckGathers, poolCheckEvery-time.Since(p.looked))
	p.mu.Unlock()
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-c.base.Done():
		return false
	}
	p.mu.Lock()
	keys := p.keys
	p.keys, p.looked = nil, time.Now()
	p.mu.Unlock()
	silent, again := p.server.DropSilent(c.base, keys...)
	if silent > 0 {
		c.log.silentConnections(silent)
	}
	if again {
		c.stepAll((*lockstate.Lock).Reconnected)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = len(p.keys) > 0
	return p.running
}
