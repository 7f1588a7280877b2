package redisserver

import (
	"context"
	"slices"
	"sync"
	"time"
)

// A server that was restarted, or whose scripts were flushed, knows no script, and a script has about 32 KB.
// If each of a thousand commands that find that out together sent the text, it would be on its way for
// seconds, and their own time would be over. So one of them sends it, and the others wait for that, and
// then send the hash.
//
// What the server knows is decided by the server alone: whoever is told again that it does not know the
// script, as when the text was lost, begins anew, and in the end sends the text in any case.
type scriptLoads struct {
	mu       sync.Mutex // guards underWay; no other mutex is locked under it
	underWay map[scriptLoad]chan struct{}
}

// scriptLoad is the text of a script on its way to a server.
type scriptLoad struct {
	script *Script
	node   string // the address of a Cluster's node
}

const (
	// loadWait is how long a command waits at most for the text that another one sends, whose connection may
	// hang. It is long enough for 32 KB over 1 Mbit/s.
	loadWait = 500 * time.Millisecond
	// loadShare is for which part of the time that a command has left it waits at most.
	loadShare = 4
	// maxLoads is how many texts of others a command waits for.
	maxLoads = 2
)

// join returns a channel that is closed when the text is no longer on its way, and whether the caller has to
// send it, and call end. A text that is known to be late is not waited for again.
func (l *scriptLoads) join(of scriptLoad, late chan struct{}) (over chan struct{}, mine bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if over = l.underWay[of]; over != nil && over != late {
		return over, false
	}
	over = make(chan struct{})
	if l.underWay == nil {
		l.underWay = make(map[scriptLoad]chan struct{})
	}
	l.underWay[of] = over
	return over, true
}

// end is called when the text was sent, or could not be.
func (l *scriptLoads) end(of scriptLoad, over chan struct{}) {
	l.mu.Lock()
	if l.underWay[of] == over {
		delete(l.underWay, of)
	}
	l.mu.Unlock()
	close(over)
}

// loadOf returns the load that a command could wait for, and false if it is not known which server gets
// the command. A command that replicas have to confirm is answered long after the server has learned its
// script, so nobody waits for one, and few such commands are under way.
func (s *Server) loadOf(ctx context.Context, script *Script, line []any) (scriptLoad, bool) {
	if s.confirm != nil {
		return scriptLoad{}, false
	}
	if s.Kind == OneNode {
		return scriptLoad{script: script}, true
	}
	key, _ := line[firstKey].(string)
	if s.Masters == nil {
		return scriptLoad{}, false
	}
	node, err := s.nodeOf(ctx, key)
	return scriptLoad{script, node.Addr()}, err == nil
}

// sendUnknown sends a command whose script the server did not know. The text is sent by this command, or
// before it by another one.
func (s *Server) sendUnknown(ctx context.Context, heard bool, script *Script, line []any) (onceCmd, error) {
	sent := func(byText bool) (onceCmd, error) {
		if !byText {
			line = slices.Clone(line) // an earlier command has this one
		}
		cmd := script.call(ctx, byText, line)
		return cmd, s.process(ctx, cmd, heard)
	}
	of, known := s.loadOf(ctx, script, line)
	var late chan struct{}
	for i := 0; known && i < maxLoads; i++ {
		over, mine := s.loads.join(of, late)
		if mine {
			defer s.loads.end(of, over) // even if a hook panics
			break
		}
		wait := loadWait
		if end, ok := ctx.Deadline(); ok {
			wait = min(wait, time.Until(end)/loadShare)
		}
		timer := time.NewTimer(wait)
		select {
		case <-over:
			timer.Stop()
		case <-late: // nil at first; it has arrived after all
			timer.Stop()
		case <-timer.C:
			late = over
			continue
		case <-ctx.Done():
			timer.Stop()
			return onceCmd{}, tooLate(ctx)
		}
		if cmd, err := sent(false); !unknownScript(err) {
			return cmd, err
		}
	}
	return sent(true)
}
