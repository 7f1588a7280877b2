// Package faults breaks things for real. It has nothing but tests, in which processes are
// killed and stopped by signals, and servers are frozen, killed, filled and cut off. What
// can be shown in virtual time is tested elsewhere; these tests are about what only an
// operating system and a real server do.
package faults
