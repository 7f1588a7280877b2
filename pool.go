package leased

import (
	"slices"
	"sync"

	"github.com/leasedmutex/leased/internal/redisserver"
)

// poolCheck looks after connections that have fallen silent while the server answers on new ones; see
// internal/redisserver/silent.go. It looks once a command has had no answer, in a goroutine that ends
// when there is nothing more to look at, and that the client waits for. A quorum looks after each of
// its servers itself.
type poolCheck struct {
	client *Client
	server *redisserver.Server

	mu      sync.Mutex // guards what follows; only group.mu is locked under it
	running bool
	keys    []string // of locks whose commands have had no answer since it last looked
}

// mostSilentKeys bounds the keys that are looked at. They stand for the masters of a Cluster.
const mostSilentKeys = 64

// hadNoAnswer is called when a command about the key has had no answer in time.
func (p *poolCheck) hadNoAnswer(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.keys) == mostSilentKeys || slices.Contains(p.keys, key) {
		return
	}
	p.keys = append(p.keys, key)
	if !p.running {
		p.running = p.client.group.start(p.run)
	}
}

func (p *poolCheck) run() {
	c := p.client
	over := false
	defer func() {
		if !over { // a hook, or a Dialer, has panicked or ended the goroutine
			p.mu.Lock()
			p.running, p.keys = false, nil
			p.mu.Unlock()
		}
	}()
	defer c.recoverPanic("a hook or the Dialer of the Redis client")
	for {
		p.mu.Lock()
		keys := p.keys
		p.keys, p.running = nil, len(keys) > 0
		p.mu.Unlock()
		if len(keys) == 0 {
			over = true
			return
		}
		silent := 0
		for _, key := range keys {
			silent += p.server.DropSilent(c.base, key)
		}
		if silent > 0 {
			c.log.silentConnections(silent)
		}
	}
}
