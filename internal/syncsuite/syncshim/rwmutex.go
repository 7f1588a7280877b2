package syncshim

import (
	"sync"

	"github.com/leasedmutex/leased"
)

// RWMutex is to sync.RWMutex what [Mutex] is to sync.Mutex.
type RWMutex struct {
	once sync.Once
	rw   *leased.RWMutex
}

func (m *RWMutex) get() *leased.RWMutex {
	m.once.Do(func() { m.rw = connection().client.RWMutex(newName()) })
	return m.rw
}

// Lock locks m for writing.
func (m *RWMutex) Lock() { asking(m.get().Lock) }

// TryLock locks m for writing if that needs no waiting, and reports whether it did.
func (m *RWMutex) TryLock() bool { return trying(m.get().TryLock) }

// Unlock undoes one Lock.
func (m *RWMutex) Unlock() { m.get().Unlock() }

// RLock locks m for reading.
func (m *RWMutex) RLock() { asking(m.get().RLock) }

// TryRLock locks m for reading if that needs no waiting, and reports whether it did.
func (m *RWMutex) TryRLock() bool { return trying(m.get().TryRLock) }

// RUnlock undoes one RLock.
func (m *RWMutex) RUnlock() { m.get().RUnlock() }

// RLocker returns a Locker whose methods are RLock and RUnlock of m.
func (m *RWMutex) RLocker() Locker { return m.get().RLocker() }
