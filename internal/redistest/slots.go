package redistest

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
)

// Move is a slot on its way from one master to another, in steps between which a test can
// look: a command with several keys is refused with TRYAGAIN while only some have moved.
type Move struct {
	c        *Cluster
	slot     int
	from, to *Instance
}

// BeginMove starts moving the slot of a key.
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

// End moves the remaining keys and tells all masters who owns the slot.
func (m *Move) End() {
	m.c.tb.Helper()
	for m.Keys(100) > 0 { // ends unless keys are written faster than they move
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

// MoveSlot does a whole Move.
func (c *Cluster) MoveSlot(key string, to *Instance) {
	c.tb.Helper()
	c.BeginMove(key, to).End()
}

// MigrateSlot moves the slot of a key to another master in one step, which Redis 8.4 and
// Valkey 9.0 introduced: no command meets a slot of which only some keys have moved. If the
// servers cannot do this, the test is skipped.
func (c *Cluster) MigrateSlot(key string, to *Instance) {
	c.tb.Helper()
	slot, from := c.Slot(key), c.Owner(key)
	id := to.mustAsk("CLUSTER", "MYID")
	// Redis wants the command at the target, Valkey at the source. A migration that failed, or that
	// could not start because an earlier one has not been cleaned up yet, is started again.
	await(c.tb, fmt.Sprintf("the migration of slot %d", slot), func() error {
		if there, here := to.self(), from.self(); there != nil && there.serves(slot) && here != nil && !here.serves(slot) {
			return nil
		}
		_, err := to.ask("CLUSTER", "MIGRATION", "IMPORT", slot, slot)
		if unknownSubcommand(err) {
			_, err = from.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", id)
		}
		if unknownSubcommand(err) {
			c.tb.Skip("the server cannot migrate a slot in one step, as Redis 8.4 and Valkey 9.0 can")
		}
		if err == nil {
			err = errors.New("it is under way")
		}
		return err
	})
}

// unknownSubcommand reports whether a server said that it does not have a subcommand. In Redis
// 6.2 and KeyDB that error begins with a capital letter, in later servers it does not.
func unknownSubcommand(err error) bool {
	return err != nil && strings.Contains(strings.ToLower(err.Error()), "unknown subcommand")
}

// clusterNode is a line of the output of CLUSTER NODES.
type clusterNode struct {
	id     string
	flags  []string
	master string // the master's id; "-" for a master
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

// self returns the node's own line in CLUSTER NODES, or nil if the node does not answer.
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
