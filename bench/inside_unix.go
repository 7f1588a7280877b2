//go:build unix

package main

import (
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"
)

// openInside maps a file that all workers share, and returns the word in it that counts those
// inside the lock.
func openInside(path string) (*atomic.Int64, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const size = 4096
	if err := f.Truncate(size); err != nil {
		return nil, err
	}
	memory, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*atomic.Int64)(unsafe.Pointer(&memory[0])), nil
}
