// Package faults breaks things for real: it has nothing but tests, in which
// processes are killed and stopped by signals, servers frozen, killed, filled and
// cut off. What virtual time can show is shown elsewhere; here it is about what
// only an operating system and a real server do.
package faults
