package leased

import (
	"context"
	"io"
	"testing"

	"github.com/redis/go-redis/v9"
)

// What only an operator can mend is no outage of the server, and nothing ends one of a
// closed client: its locks would be probed every 2 s for ever.
func TestAFailureThatLastsIsNoOutage(t *testing.T) {
	for what, c := range map[string]struct {
		err  error
		lost bool
	}{
		"a closed client":      {errRedisClosed, false},
		"another type":         {otherTypeAnswer{}, false},
		"no answer":            {io.ErrUnexpectedEOF, true},
		"no answer by our own": {context.DeadlineExceeded, true},
	} {
		client, err := New(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}))
		if err != nil {
			t.Fatal(err)
		}
		client.outage.failed(classify(c.err))
		client.inbox.suspect(classify(c.err))
		if on, suspected := client.outage.on.Load(), client.inbox.hearing.suspected; on != c.lost || suspected != c.lost {
			t.Errorf("%s: outage %v, inbox suspected %v", what, on, suspected)
		}
		_ = client.Close()
	}
}

type otherTypeAnswer struct{}

func (otherTypeAnswer) Error() string {
	return "WRONGTYPE Operation against a key holding the wrong kind of value"
}
func (otherTypeAnswer) RedisError() {}
