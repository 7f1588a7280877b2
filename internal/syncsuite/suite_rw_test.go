package syncsuite

import "testing"

func TestGoSyncRWMutexTests(t *testing.T) {
	runSuite(t, "rwmutex_test.go", "TestParallelReaders", "TestRWMutex", "TestRLocker")
}
