package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Redis quotes an unknown command with an apostrophe since 7.0, and with backquotes before.
func TestARedisThatIsNoSentinelIsCalledSo(t *testing.T) {
	for _, text := range []string{
		"ERR unknown command 'sentinel', with args beginning with: 'get-master-addr-by-name' 'mymaster' ",
		"ERR unknown command `sentinel`, with args beginning with: `get-master-addr-by-name`, `mymaster`, ",
	} {
		err := inPlainWords(errors.New("redis: all sentinels specified in configuration are unreachable: " + text))
		if !strings.Contains(err.Error(), "leave out --sentinel") {
			t.Errorf("%q is called %q", text, err)
		}
	}
}

// To leave out --tls is not enough if another flag turns TLS on.
func TestAllFlagsThatTurnTLSOnAreNamed(t *testing.T) {
	ca, cert := x509.NewCertPool(), []tls.Certificate{{}}
	for flags, c := range map[string]*tls.Config{
		"--tls":                             {},
		"--tls and --cacert":                {RootCAs: ca},
		"--tls, --cert and --key":           {Certificates: cert},
		"--tls, --cacert, --cert and --key": {RootCAs: ca, Certificates: cert},
	} {
		for _, err := range []error{errors.New("read: i/o timeout"), errors.New("tls: first record does not look like a TLS handshake")} {
			got := unconnected(&redis.UniversalOptions{TLSConfig: c}, err)
			if want := "begin the URL with redis:// and leave out " + flags + " ("; !strings.Contains(got.Error(), want) || !errors.Is(got, err) {
				t.Errorf("%q does not say %q", got, want)
			}
		}
	}
}
