//go:build !go1.26

package redisserver

import "crypto/sha1" //nolint:gosec // the name that Redis gives a script, no secret

// hashOf returns the hash by which Redis identifies a script. Go 1.25 has no way to compute it in a
// program that is restricted to the algorithms of FIPS 140-3, so such a program panics here as it starts.
func hashOf(text []byte) [sha1.Size]byte { return sha1.Sum(text) }
