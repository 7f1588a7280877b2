package redistest

import (
	"fmt"
	"net"
	"slices"
	"strings"
)

// Move is a slot on its way from one master to another, in steps that a test can look
// at: what has several keys is refused with TRYAGAIN while only some have moved.
type Move struct {
	c        *Cluster
	slot     int
	from, to *Instance
}

// BeginMove begins to move the slot of a key.
func (c *Cluster) BeginMove(key string, to *Instance) *Move {
	c.tb.Helper()
	m := &Move{c: c, slot: c.Slot(key), from: c.Owner(key), to: to}
	m.to.mustAsk("CLUSTER", "SETSLOT", m.slot, "IMPORTING", m.from.mustAsk("CLUSTER", "MYID"))
	m.from.mustAsk("CLUSTER", "SETSLOT", m.slot, "MIGRATING", m.to.mustAsk("CLUSTER", "MYID"))
	return m
}

// Keys moves at most n keys and returns how many it moved.
func (m *Move) Keys(n int) int {
	m.c.tb.Helper()
	list, _ := m.from.mustAsk("CLUSTER", "GETKEYSINSLOT", m.slot, n).([]any)
	if len(list) == 0 {
		return 0
	}
	host, port, _ := net.SplitHostPort(m.to.Addr)
	m.from.mustAsk(append([]any{"MIGRATE", host, port, "", 0, 5000, "KEYS"}, list...)...)
	return len(list)
}

// End moves what is left and tells all masters whose the slot is.
func (m *Move) End() {
	m.c.tb.Helper()
	for m.Keys(100) > 0 { // bounded by the keys that are written meanwhile
	}
	id := m.to.mustAsk("CLUSTER", "MYID")
	told := []*Instance{m.to, m.from}
	for _, in := range m.c.Nodes {
		if !slices.Contains(told, in) && in.role() == "master" {
			told = append(told, in)
		}
	}
	for _, in := range told {
		in.mustAsk("CLUSTER", "SETSLOT", m.slot, "NODE", id)
	}
}

// MoveSlot does all of a Move.
func (c *Cluster) MoveSlot(key string, to *Instance) {
	c.tb.Helper()
	c.BeginMove(key, to).End()
}

// clusterNode is a line of CLUSTER NODES.
type clusterNode struct {
	id     string
	flags  []string
	master string // id, "-" for a master
	ranges [][2]int
}

func (n *clusterNode) serves(slot int) bool {
	return slices.ContainsFunc(n.ranges, func(r [2]int) bool { return r[0] <= slot && slot <= r[1] })
}

func (in *Instance) clusterNodes() ([]clusterNode, error) {
	reply, err := in.ask("CLUSTER", "NODES")
	if err != nil {
		return nil, err
	}
	var all []clusterNode
	for line := range strings.Lines(fmt.Sprint(reply)) {
		fields := strings.Fields(line)
		if len(fields) < 8 {
			continue
		}
		n := clusterNode{id: fields[0], flags: strings.Split(fields[2], ","), master: fields[3]}
		for _, text := range fields[8:] {
			first, last, isRange := strings.Cut(text, "-")
			if strings.HasPrefix(text, "[") { // a slot that is being moved
				continue
			}
			if !isRange {
				last = first
			}
			n.ranges = append(n.ranges, [2]int{number(first), number(last)})
		}
		all = append(all, n)
	}
	return all, nil
}

// self is the node's line about itself, nil if it does not answer.
func (in *Instance) self() *clusterNode {
	all, err := in.clusterNodes()
	if err != nil {
		return nil
	}
	for i := range all {
		if slices.Contains(all[i].flags, "myself") {
			return &all[i]
		}
	}
	return nil
}
