package leased

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

const maxNameBytes = 512

// keys are what one lock is made of in Redis. All are in one cluster slot, and
// whatever ACL pattern admits the lock's own key admits the others. Only the
// name is kept: a client may hold very many locks, and uses the keys seldom.
type keys struct {
	lock   string // the owner's id, or the marker while readers own
	name   string // without prefix
	tagged bool   // the name has a hash tag of its own
}

func newKeys(prefix, name string) (keys, error) {
	if err := validName(prefix, name); err != nil {
		return keys{}, err
	}
	key := prefix + name
	return keys{lock: key, name: key[len(prefix):], tagged: strings.Contains(key, "{")}, nil
}

func (k *keys) helper(what string) string {
	if k.tagged {
		// Two colons: with one, the name N:{N} would have the keys beside N.
		return k.lock + "::" + what
	}
	return k.lock + ":{" + k.lock + "}:" + what
}

func (k *keys) queue() string   { return k.helper("queue") }   // sorted set of waiting requests by their order
func (k *keys) readers() string { return k.helper("readers") } // sorted set of owning readers by expiry
func (k *keys) waiters() string { return k.helper("waiters") } // sorted set of waiting requests by expiry
func (k *keys) meta() string    { return k.helper("meta") }    // last token

// all returns the keys in the order in which the scripts expect them, boxed for
// go-redis. They share one string: every command of a lock needs them.
func (k *keys) all() [5]any {
	queue, readers, waiters, meta := k.queue(), "readers", "waiters", "meta"
	stem := queue[:len(queue)-len("queue")]
	text := queue + stem + readers + stem + waiters + stem + meta
	next := func(n int) string {
		key := text[:n]
		text = text[n:]
		return key
	}
	return [5]any{
		k.lock,
		next(len(queue)),
		next(len(stem) + len(readers)),
		next(len(stem) + len(waiters)),
		next(len(stem) + len(meta)),
	}
}

// validName admits what has one hash tag or none. A cluster hashes what stands
// between the first brace and the next closing one, if that is not empty; any
// other use of braces would tear a lock's keys apart.
func validName(prefix, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrInvalidName)
	case len(name) > maxNameBytes:
		return fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrInvalidName, len(name), maxNameBytes)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: %q is not UTF-8", ErrInvalidName, name)
	}
	key := prefix + name
	open, shut := strings.IndexByte(key, '{'), strings.IndexByte(key, '}')
	switch {
	case open < 0 && shut < 0:
		return nil
	case open < 0 || (shut >= 0 && shut < open):
		return fmt.Errorf("%w: %q has a } without a { before it", ErrInvalidName, key)
	case shut < 0:
		return fmt.Errorf("%w: %q has a { that is not closed", ErrInvalidName, key)
	case shut == open+1:
		return fmt.Errorf("%w: %q has an empty hash tag {}", ErrInvalidName, key)
	}
	for _, helper := range [...]string{":queue", ":readers", ":waiters", ":meta"} {
		if strings.HasSuffix(key, helper) {
			return fmt.Errorf("%w: %q ends as the keys beside another lock do", ErrInvalidName, key)
		}
	}
	return nil
}
