package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/leasedmutex/leased/internal/redistest"
)

func TestDoctorFindsAReplacedPrimaryThatWasNotDemoted(t *testing.T) {
	replica := func(port, role string) map[string]string {
		return map[string]string{"ip": "10.0.0.1", "port": port, "role-reported": role}
	}
	good := sentinelView{"10.0.0.1:1", []map[string]string{replica("2", "slave"), replica("3", "slave")}}
	bad := sentinelView{"10.0.0.1:1", []map[string]string{replica("2", "slave"), replica("3", "master")}}
	late := sentinelView{"10.0.0.1:3", []map[string]string{replica("1", "master"), replica("2", "slave")}} // it has yet to hear of the failover
	failed := errors.New("10.0.0.9:26379: i/o timeout")
	for _, c := range []struct {
		answers []sentinelView
		failed  error
		verdict verdict
		found   string
		change  string
	}{
		{[]sentinelView{good, good}, nil, verdictOK, "2 replicas of the Sentinels, none of which says that it is a primary", ""},
		{[]sentinelView{good}, failed, verdictOK, "2 replicas", ""},
		{[]sentinelView{good, bad}, failed, verdictBad, "10.0.0.1:3 is to be a replica, but says that it is a primary", "REPLICAOF 10.0.0.1 1 at 10.0.0.1:3;"},
		{[]sentinelView{late, good, good}, nil, verdictOK, "2 replicas", ""},
		{[]sentinelView{late, good, bad}, nil, verdictBad, "10.0.0.1:3 is to be", "REPLICAOF 10.0.0.1 1 at 10.0.0.1:3;"},
		{[]sentinelView{late, good}, nil, verdictUnknown, "no majority", "wait for the end of a failover"},
		{nil, failed, verdictUnknown, "i/o timeout", ""},
		{nil, errors.New("NOPERM this user has no permissions"), verdictUnknown, "NOPERM", "allow +sentinel|replicas"},
	} {
		f := rolesFinding(c.answers, c.failed)
		if f.verdict != c.verdict || !strings.Contains(f.found, c.found) || !strings.Contains(f.change, c.change) || f.verdict != verdictOK && f.means == "" {
			t.Errorf("%+v, %v: %+v", c.answers, c.failed, f)
		}
	}
}

func TestDoctorAsksTheSentinelsAboutTheirReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("sentinels take seconds to start, and to ask a replica; run it without -short")
	}
	s := redistest.NewSentinels(t)
	o := s.FailoverOptions()
	args := []string{"doctor", "--sentinel", o.MasterName, "--redis", strings.Join(o.SentinelAddrs, ",")}
	if got := invoke(t, args...); got.status != 0 || !strings.Contains(got.out, "\nok    replicas     2 replicas of the Sentinels") {
		t.Errorf("%+v", got)
	}
	stray := s.Nodes[1]
	rdb := stray.Client()
	// The Sentinels would demote it, and lack the right to.
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "default", "-slaveof", "-replicaof").Err(); err != nil {
		t.Fatal(err)
	}
	if err := rdb.Do(t.Context(), "ACL", "SETUSER", "admin", "on", ">pass", "~*", "&*", "+@all").Err(); err != nil {
		t.Fatal(err)
	}
	conn := rdb.Conn()
	defer conn.Close()
	if err := conn.AuthACL(t.Context(), "admin", "pass").Err(); err != nil {
		t.Fatal(err)
	}
	if err := conn.Do(t.Context(), "REPLICAOF", "NO", "ONE").Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the Sentinels have heard of it", func() bool {
		got := invoke(t, args...)
		return got.status == 1 && strings.Contains(strings.Join(strings.Fields(got.out), " "), "bad replicas "+stray.Addr+" is to be a replica, but says that it is a primary")
	})
}
