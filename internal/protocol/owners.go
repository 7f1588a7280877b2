package protocol

import (
	"strconv"
	"time"
)

// Owner is an owner of a lock as a Snapshot shows it. Its fields are those of leased.Owner, whose comments
// say what they are.
type Owner struct {
	Client   string
	Shared   bool
	TTL      time.Duration
	Since    time.Time
	Token    uint64
	Unlocked bool
	Value    string
}

// Owners returns the lock's owners: the client or program that the lock's key names, or the readers.
// Anything that can write to Redis may have written the snapshot, so no part of it is assumed to be
// well-formed.
func (s *Snapshot) Owners() []Owner {
	switch s.Value {
	case "":
		return nil
	case MarkerValue:
		return s.readers()
	}
	token, since := ParseMeta(s.Meta)
	if id, err := ParseID(s.Value); err == nil {
		return []Owner{{Client: id.Label, TTL: s.Left, Since: since, Token: token}}
	}
	if who, ok := ParseCooldown(s.Value); ok {
		return []Owner{{Client: who.Label, TTL: s.Left, Since: since, Token: token, Unlocked: true}}
	}
	return []Owner{{TTL: s.Left, Value: s.Value}}
}

// readers returns the owners of a lock that readers have.
func (s *Snapshot) readers() (readers []Owner) {
	for i := 0; i+1 < len(s.Readers); i += 2 {
		ends, _ := strconv.ParseFloat(s.Readers[i+1], 64)
		left := max(-1<<52, min(ends-float64(s.Clock/1000), 1<<52)) // a score can be anything, even inf
		reader := Owner{Shared: true, TTL: Remaining(int64(left))}
		if id, err := ParseID(s.Readers[i]); err == nil {
			reader.Client = id.Label
			if id.Origin.Token > 0 { // a writer that was downgraded
				reader.Token = id.Origin.Token
				// A token ahead of the clock is not a time: the clock was set back. A quorum's servers have
				// several.
				if reader.Token <= s.Clock || s.Servers > 0 {
					reader.Since = time.UnixMicro(int64(reader.Token))
				}
			}
		} else {
			reader.Value = s.Readers[i]
		}
		readers = append(readers, reader)
	}
	return readers
}

// Remaining converts ms to a duration of at most 100 years, because a foreign client can
// set an expiry that does not fit.
func Remaining(ms int64) time.Duration {
	const century = 100 * 365 * 24 * 3600 * 1000
	return time.Duration(max(-century, min(ms, century))) * time.Millisecond
}
