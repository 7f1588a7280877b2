package leased

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Info is what Redis knew of a lock at one instant.
type Info struct {
	Name    string
	Owners  []Owner   // one writer, or readers; empty if the lock is free
	Waiting []Waiting // in the order in which they will be served; the first 1,000
	Queue   int       // how many processes wait
	Token   uint64    // last fencing token known to Redis, 0 if none is remembered
}

// Owner is a process that has a lock.
type Owner struct {
	Client string        // its readable id; empty for a foreign owner
	Shared bool          // it reads
	TTL    time.Duration // until Redis takes the lock away if nobody renews it; negative if never
	Since  time.Time     // by Redis' clock, when it was made owner; zero where that is not kept
	Token  uint64        // of the grant, 0 where that is not kept
	Value  string        // what stands in the lock's key, for foreign owners and later versions only
}

// Waiting is a process that waits for a lock.
type Waiting struct {
	Client string
	Shared bool
}

// Inspect returns what Redis knows of a lock. It takes nothing, changes nothing
// and does not need the lock to exist.
func (c *Client) Inspect(ctx context.Context, name string) (Info, error) {
	k, err := c.operate(name)
	if err != nil {
		return Info{}, err
	}
	s, err := c.server.inspect(ctx, &k)
	if err != nil {
		return Info{}, fmt.Errorf("leased: inspecting lock %q: %w", name, err)
	}
	return s.info(name), nil
}

// ForceUnlock evicts whoever owns the lock, foreign owners included, and lets
// the next waiter in. Owners of ours are told at once: their leases' contexts
// end with ErrLeaseLost; but they may still be at work, so this is for people
// who know that the owner is gone or wrong. It is no error if nobody owns it.
func (c *Client) ForceUnlock(ctx context.Context, name string) error {
	k, err := c.operate(name)
	if err != nil {
		return err
	}
	if _, err := c.server.evict(ctx, &k); err != nil {
		return fmt.Errorf("leased: forcing lock %q: %w", name, err)
	}
	return nil
}

func (c *Client) operate(name string) (keys, error) {
	c.mu.Lock()
	closed := c.closedLocked()
	c.mu.Unlock()
	if closed {
		return keys{}, ErrClosed
	}
	return newKeys(c.opts.prefix, name)
}

// snapshot is the answer of inspect.lua.
type snapshot struct {
	value   string
	left    time.Duration
	clock   uint64 // µs
	meta    string
	readers []string // id, expiry in ms, …
	queue   []string
	length  int
}

func parseSnapshot(reply []any) (snapshot, error) {
	if len(reply) != 7 {
		return snapshot{}, fmt.Errorf("leased: malformed answer %.200q", fmt.Sprint(reply))
	}
	text := func(v any) string { s, _ := v.(string); return s }
	number := func(v any) int64 { n, _ := v.(int64); return n }
	list := func(v any) []string {
		all, _ := v.([]any)
		out := make([]string, 0, len(all))
		for _, x := range all {
			switch x := x.(type) {
			case string:
				out = append(out, x)
			case int64:
				out = append(out, strconv.FormatInt(x, 10))
			case float64:
				out = append(out, strconv.FormatFloat(x, 'f', 0, 64))
			case []any: // RESP3: a pair
				for _, y := range x {
					out = append(out, fmt.Sprintf("%v", y))
				}
			}
		}
		return out
	}
	return snapshot{
		value:   text(reply[0]),
		left:    remaining(number(reply[1])),
		clock:   uint64(number(reply[2])),
		meta:    text(reply[3]),
		readers: list(reply[4]),
		queue:   list(reply[5]),
		length:  int(number(reply[6])),
	}, nil
}

func (s *snapshot) info(name string) Info {
	info := Info{Name: name, Queue: s.length}
	var since time.Time
	if rest, ok := strings.CutPrefix(s.meta, formatTag); ok {
		token, at, _ := strings.Cut(rest, ":")
		info.Token, _ = strconv.ParseUint(token, 10, 53)
		if us, err := strconv.ParseInt(at, 10, 64); err == nil {
			since = time.UnixMicro(us)
		}
	}
	switch who, err := parseID(s.value); {
	case s.value == "":
	case s.value == markerValue:
		for i := 0; i+1 < len(s.readers); i += 2 {
			ends, _ := strconv.ParseFloat(s.readers[i+1], 64)
			left := max(-1<<52, min(ends-float64(s.clock/1000), 1<<52)) // a score can be anything, even inf
			reader := Owner{Shared: true, TTL: remaining(int64(left))}
			if who, err := parseID(s.readers[i]); err == nil {
				reader.Client = who.label
			} else {
				reader.Value = s.readers[i]
			}
			info.Owners = append(info.Owners, reader)
		}
	case err != nil:
		info.Owners = []Owner{{TTL: s.left, Value: s.value}}
	default:
		info.Owners = []Owner{{Client: who.label, TTL: s.left, Since: since, Token: info.Token}}
	}
	for _, id := range s.queue {
		w := Waiting{}
		if who, err := parseID(id); err == nil {
			w = Waiting{Client: who.label, Shared: who.mode == shared}
		}
		info.Waiting = append(info.Waiting, w)
	}
	return info
}

// blockerName returns the readable part of what blocked a caller.
func blockerName(value string) string {
	who, err := parseID(value)
	switch {
	case value == "" || value == markerValue:
		return ""
	case err == nil:
		return who.label
	case newerFormat(value):
		return "a later version of leased"
	}
	return "a foreign client"
}
