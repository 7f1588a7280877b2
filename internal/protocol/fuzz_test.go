package protocol

import (
	"strings"
	"testing"
)

// What comes from Redis and from the inbox can be anything: nothing may panic, and what is
// accepted has to mean what it says.

func FuzzParseMessage(f *testing.F) {
	for _, seed := range []string{
		"leased1:granted 1795347830934162 1795347830934224 0 - leased1:w:15000:u:HbZEXU7hLZS2nN2A:_ndYsGKQ3wY2CW2s:vm:1 x",
		"leased1:wanted leased1:r:1000:c:HbZEXU7hLZS2nN2A:_ndYsGKQ3wY2CW2s:vm:1 a key with spaces",
		"leased1:ends 500 leased1:w:1000:c:HbZEXU7hLZS2nN2A:_ndYsGKQ3wY2CW2s:vm:1 x",
		"leased1:revoked 7 leased1:w:1000:c:HbZEXU7hLZS2nN2A:_ndYsGKQ3wY2CW2s:vm:1 x",
		"leased1:echo 12", "leased2:granted 1", "leased1:", "granted", "", "leased1:granted -1 -1 2 zz  ", "leased1:ends 99999999999999999999 id x",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		m, ok := ParseMessage(text)
		if !ok {
			return
		}
		if !strings.HasPrefix(text, "leased1:"+string(m.Kind)+" ") {
			t.Errorf("%q is taken for %q", text, m.Kind)
		}
		if m.Kind != MessageEcho && (m.ID == "" || !strings.HasSuffix(text, " "+m.Key)) {
			t.Errorf("%q is about %q, %q", text, m.ID, m.Key)
		}
		if m.Left < 0 || m.Token > 1<<53 {
			t.Errorf("%q: %+v", text, m)
		}
	})
}
