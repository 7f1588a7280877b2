package redistest

import "testing"

// A test may have killed the server that has the port, and is about to start it again.
func TestAPortIsNotGivenToASecondServerSoon(t *testing.T) {
	port, err := FreePort()
	if err != nil {
		t.Fatal(err)
	}
	node, err := clusterPort()
	if err != nil {
		t.Fatal(err)
	}
	for _, given := range []int{port, node, node + busDelta} {
		if claim(given) {
			t.Errorf("port %d may be given again", given)
		}
	}
}

// Processes that test at the same time have ports of their own, even those of killed servers.
func TestAShareOfThePortsIsGivenToOne(t *testing.T) {
	const guards = firstGuard - shares // or other processes would find no share
	taken := map[int]bool{}
	for range shares {
		share, guard := takeShare(guards)
		if share < 0 {
			t.Fatalf("only %d shares", len(taken))
		}
		defer guard.Close()
		if taken[share] {
			t.Fatalf("share %d is given twice", share)
		}
		taken[share] = true
	}
	if share, _ := takeShare(guards); share >= 0 {
		t.Errorf("share %d is given, though all are", share)
	}
}

func TestAllPortsAreOfTheProcessShare(t *testing.T) {
	own, _ := ownShare()
	if own < 0 {
		t.Skip("more processes than shares test at the same time")
	}
	for range 10 {
		a, err := FreePort()
		if err != nil {
			t.Fatal(err)
		}
		b, err := clusterPort()
		if err != nil {
			t.Fatal(err)
		}
		for _, port := range []int{a, b, b + busDelta} {
			if (port-firstPort)%shares != own {
				t.Errorf("port %d is not of share %d", port, own)
			}
		}
	}
}
