package leased

import "testing"

func TestAcquireSaysWhetherItExtended(t *testing.T) {
	onScripts(t, func(t *testing.T, s *scene) {
		for _, id := range []string{s.writer("A"), s.reader("A")} {
			if a := s.acquire(id); a.outcome != granted || a.kept {
				t.Errorf("at first: %+v", a)
			}
			if a := s.acquire(id); a.outcome != granted || !a.kept {
				t.Errorf("of the owner: %+v", a)
			}
			s.is(s.release(id, 0), done)
		}
	})
}
