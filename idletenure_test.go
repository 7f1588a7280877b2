package leased

import (
	"testing"
	"time"
)

func TestAGrantThatIdledLongHasItsWholeTenureBeforeIt(t *testing.T) {
	idle := func(o *lockOptions) { o.idleHold = time.Hour }
	a, b, c := writer(idle), writer(idle), writer(idle)
	h := holding(t, a).keep()
	h.leave(a)
	h.pass(2 * longestTenure)
	h.enter(b)
	h.in(b)
	h.enter(c)
	h.leave(b)
	h.in(c)
	h.sendsNothing()
}

func TestARequestWithoutAnswerIsAskedAboutAfterThePauseOnly(t *testing.T) {
	h := drive(t)
	h.enter(writer())
	h.sends(acquire)
	h.reply(answer{}, errSilence, time.Second)
	h.pass(time.Second - time.Millisecond)
	h.sendsNothing()
	h.pass(time.Millisecond)
	h.sends(acquire)
}
