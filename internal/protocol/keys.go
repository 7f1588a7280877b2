package protocol

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

const maxNameBytes = 512

// Keys are the Redis keys of one lock. They share one cluster slot, and an ACL pattern with a
// trailing * that admits the lock's own key admits them all. Only the lock's own key is
// stored. The others are derived when needed, because a client may hold very many locks.
type Keys struct {
	Lock   string // the lock's own key: holds the owner's id, or MarkerValue while readers own the lock
	prefix int32  // length of the prefix in Lock
	tagged bool   // the prefix or the name contains a hash tag
}

// Name is the lock's name: its key without the prefix.
func (k *Keys) Name() string { return k.Lock[k.prefix:] }

// NewKeys returns the keys of the lock with this name, or an error that matches
// ErrInvalidName.
func NewKeys(prefix, name string) (Keys, error) {
	if err := validName(prefix, name); err != nil {
		return Keys{}, err
	}
	key := prefix + name
	return Keys{Lock: key, prefix: int32(len(prefix)), tagged: strings.Contains(key, "{")}, nil
}

// helper returns the helper key named what.
func (k *Keys) helper(what string) string {
	s := k.stem()
	return s[0] + s[1] + s[2] + s[3] + what
}

// stem returns what precedes the names of helper keys, in parts.
func (k *Keys) stem() [4]string {
	if k.tagged {
		// Two colons: with one, the lock N:{N} would have the helper keys of the lock N.
		return [4]string{k.Lock, "::"}
	}
	return [4]string{k.Lock, ":{", k.Lock, "}:"}
}

// What the names of helper keys end with. validName keeps these ends from the names of locks.
const (
	queueEnd   = "queue"
	readersEnd = "readers"
	waitersEnd = "waiters"
	metaEnd    = "meta"
)

// helpers has them in the order that the scripts expect.
var helpers = [...]string{queueEnd, readersEnd, waitersEnd, metaEnd}

// Queue is the sorted set of waiting requests, ordered by place.
func (k *Keys) Queue() string { return k.helper(queueEnd) }

// Readers is the sorted set of readers that own the lock, ordered by expiry.
func (k *Keys) Readers() string { return k.helper(readersEnd) }

// Waiters is the sorted set of waiting requests, ordered by expiry.
func (k *Keys) Waiters() string { return k.helper(waitersEnd) }

// Meta holds the lock's last token.
func (k *Keys) Meta() string { return k.helper(metaEnd) }

// All returns the keys in the order that the scripts expect, boxed for go-redis. The four
// derived keys share one string, which saves allocations on every command.
func (k *Keys) All() [5]any {
	stem := k.stem()
	long := len(stem[0]) + len(stem[1]) + len(stem[2]) + len(stem[3])
	var text strings.Builder
	text.Grow(len(helpers)*long + len(queueEnd+readersEnd+waitersEnd+metaEnd))
	for _, name := range helpers {
		for _, part := range stem {
			text.WriteString(part)
		}
		text.WriteString(name)
	}
	all, rest := [5]any{k.Lock}, text.String()
	for i, name := range helpers {
		all[1+i], rest = rest[:long+len(name)], rest[long+len(name):]
	}
	return all
}

// validName accepts names without control characters, which would garble the logs and
// terminals that names are written to. If there are braces, the first ones must be a hash tag:
// a cluster hashes the text between the first opening brace and the next closing one, unless
// that text is empty. Any other first braces would spread a lock's keys over several slots.
func validName(prefix, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrInvalidName)
	case len(name) > maxNameBytes:
		return fmt.Errorf("%w: %.32q… has %d bytes, at most %d are allowed", ErrInvalidName, name, len(name), maxNameBytes)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: %q is not UTF-8", ErrInvalidName, name)
	}
	key := prefix + name
	if strings.HasSuffix(key, markName) {
		return fmt.Errorf("%w: %q ends with %q, which is where a server of a quorum keeps its age", ErrInvalidName, key, markName)
	}
	if strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("%w: %q has control characters", ErrInvalidName, key)
	}
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
	for _, helper := range helpers {
		if stem, ends := strings.CutSuffix(key, helper); ends && strings.HasSuffix(stem, ":") {
			return fmt.Errorf("%w: %q ends like a helper key of another lock", ErrInvalidName, key)
		}
	}
	return nil
}

const markName = "leased:quorum:mark"

// MarkKey returns the key in which a server of a quorum records since when it has kept its
// data. It is never a lock's own key, whatever the lock's prefix.
func MarkKey(prefix string) string { return prefix + markName }

// InboxChannel returns the channel on which a client receives its messages.
func InboxChannel(prefix, client string) string { return prefix + "leased:inbox:" + client }
