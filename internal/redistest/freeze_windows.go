package redistest

// Stop skips the test, because Windows has no signal that freezes a program.
func (in *Instance) Stop() {
	in.helper()
	if in.tb != nil {
		in.tb.Skip("redistest: a server cannot be frozen on Windows")
	}
	panic("redistest: a server cannot be frozen on Windows")
}

// Cont does nothing: see Stop.
func (in *Instance) Cont() {}

func (p *process) thaw() {}
