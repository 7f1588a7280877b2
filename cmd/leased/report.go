package main

import (
	"fmt"
	"strings"
	"time"
)

// What the demo prints, in the order in which it is printed.

func (d *demo) introduce(server string) {
	o := &d.options
	buyers := o.workers * o.buyers
	d.screen.line("%s in stock, %s in %s. Each buyer reads the stock", count(o.stock, "piece", "pieces"),
		count(buyers, "buyer", "buyers"), count(o.workers, "process", "processes"))
	d.screen.line("from Redis, thinks for 2 to 5 ms, and writes back one less.")
	d.screen.line("%s", d.screen.faint("Redis at "+server))
	if d.locks != nil {
		d.screen.line("The lock around that is on five more servers, none of which knows of the others.")
		d.screen.line("%s", d.screen.faint("Redis at "+strings.Join(d.locks.addrs(), ", ")))
		d.screen.line("%s", d.screen.faint("They are assumed to have run for longer than the quarantine of new servers."))
	}
}

func (d *demo) heading(number, text string) {
	d.screen.line("")
	d.screen.line("%s", d.screen.bold(number+"  "+text))
}

// watch shows the progress of a sale.
func (d *demo) watch(s *sale) {
	if k := s.killed; k != nil && k.next == 0 {
		left := max(0, k.left-time.Since(k.at))
		d.screen.progress("   the others wait for the dead process's lease to expire: %.1f s", left.Seconds())
		return
	}
	d.screen.progress("   %d sold, %d refused, %d to come", s.soldCount(), s.refusedCount(), s.died())
}

func (d *demo) withoutLock(s *sale) {
	number := s.soldCount()
	text := fmt.Sprintf("%d sold from a stock of %d", number, s.stock)
	left := fmt.Sprintf("Redis says %d are left.", s.left)
	switch over := number - s.stock; {
	case over > 0:
		d.screen.line("   %s: %d too many. %s", d.screen.bad(text), over, left)
		d.screen.line("   Several buyers read the same number before one of them wrote.")
	case s.left != s.stock-number:
		d.screen.line("   %s, but %s", d.screen.bad(text), left)
		d.screen.line("   %s forgotten.", count(s.left-(s.stock-number), "sale was", "sales were"))
	default:
		d.screen.line("   %s. %s Nothing went wrong this time.", text, left)
	}
}

func (d *demo) killedInside(s *sale, seen int) {
	d.screen.line("   Process %d (pid %d) has read a stock of %d and not yet written: %s.",
		s.killed.process, s.killed.pid, seen, d.screen.bad("killed"))
	d.screen.line("   It cannot unlock anymore. Its lease has %s left.", seconds(s.killed.left))
}

func (d *demo) recovered(s *sale) {
	d.screen.line("   The lease expired: %s %s after the kill.",
		d.screen.good("next sale"), seconds(s.killed.next))
	d.screen.line("")
}

// withLock reports the sale with the lock. It returns an error if the lock failed.
func (d *demo) withLock(s *sale) error {
	if err := s.verdict(); err != nil {
		d.table(s)
		return err // run prints it
	}
	d.screen.line("   %s, %d told \"sold out\". Redis says %d are left.",
		d.screen.good(fmt.Sprintf("%d sold from a stock of %d", s.soldCount(), s.stock)), s.refusedCount(), s.left)
	if n := s.died(); n > 0 {
		d.screen.line("   %s died with process %d.", count(n, "buyer", "buyers"), s.killed.process)
	}
	d.screen.line("")
	d.table(s)
	d.screen.line("")
	d.totals(s)
	return nil
}

func (d *demo) table(s *sale) {
	// A narrow terminal has no room for the waits.
	narrow := d.screen.live && widthOf(d.screen.out) < 60
	if narrow {
		d.screen.line("%s", d.screen.faint("   process  bought  refused"))
	} else {
		d.screen.line("%s", d.screen.faint("   process   bought   refused   wait p50   wait p99"))
	}
	row := func(name string, bought, refused int, waits []time.Duration, note string) {
		p50, p99 := "-", "-"
		if len(waits) > 0 {
			p50, p99 = milliseconds(quantile(waits, 0.50)), milliseconds(quantile(waits, 0.99))
		}
		if narrow {
			d.screen.line("   %7s  %6d  %7d%s", name, bought, refused, note)
			return
		}
		d.screen.line("   %7s   %6d   %7d   %8s   %8s%s", name, bought, refused, p50, p99, note)
	}
	for _, p := range s.parts {
		note := ""
		if s.killed != nil && s.killed.process == p.process {
			note = "   killed"
		}
		row(fmt.Sprint(p.process), len(p.sold), p.refused, p.waits, note)
	}
	row("all", s.soldCount(), s.refusedCount(), s.waits(), "")
}

func (d *demo) totals(s *sale) {
	t := s.stats()
	local := t.Local + t.Idle
	d.screen.line("   The lock was taken %s, on %s from Redis:", count(int(t.Leases), "time", "times"),
		count(int(t.Leases-local), "grant", "grants"))
	d.screen.line("   %5d  local hand-offs: to the next buyer of the process, without Redis", local)
	d.screen.line("   %5d  direct hand-offs: to the next process, by the unlock itself", t.Direct)
	d.screen.line("   %5d  by asking Redis", t.Leases-local-t.Direct)
	if s.killed != nil {
		d.screen.line("          in the surviving processes; the dead one cannot report")
	}
	d.screen.line("   %s in all. Fencing tokens grew with every sale.",
		count(int(t.Commands), "Redis command", "Redis commands"))
	if d.locks != nil {
		d.behind(t.Behind)
	}
}
