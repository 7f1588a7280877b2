//go:build go1.26

package redisserver

import (
	"crypto/fips140"
	"crypto/sha1" //nolint:gosec // the name that Redis gives a script, no secret
)

// hashOf returns the hash by which Redis identifies a script. Nothing's security depends on it, so it is
// computed even in a program that is restricted to the algorithms of FIPS 140-3 (GODEBUG=fips140=only).
func hashOf(text []byte) (sum [sha1.Size]byte) {
	fips140.WithoutEnforcement(func() { sum = sha1.Sum(text) })
	return sum
}
