package figures

import (
	"slices"
	"testing"
	"time"

	"github.com/leasedmutex/leased/internal/redistest"
)

func TestAQuantileIsASampleAndLeavesTheirOrder(t *testing.T) {
	samples := []int{30, 10, 40, 20}
	for q, want := range map[float64]int{0: 10, .25: 20, .5: 30, .99: 40, 1: 40} {
		if got := Quantile(samples, q); got != want {
			t.Errorf("quantile %v: %d, want %d", q, got, want)
		}
	}
	if got := Median(samples); got != 30 {
		t.Errorf("median %d, want 30", got)
	}
	if got := Median([]time.Duration(nil)); got != 0 {
		t.Errorf("%v is the median of nothing", got)
	}
	if !slices.Equal(samples, []int{30, 10, 40, 20}) {
		t.Errorf("the samples are %v now", samples)
	}
}

func TestARatioToNothingIsFinite(t *testing.T) {
	if got := Ratio(3*time.Second, 2*time.Second); got != 1.5 {
		t.Errorf("3 to 2: %v", got)
	}
	if got := Ratio(5, 0); got != 5 {
		t.Errorf("5 ns to nothing: %v", got)
	}
}

func TestTheProcessorTimeGrowsAndAServerThatIsGoneIsAnError(t *testing.T) {
	in := redistest.Server(t)
	rdb := in.Client()
	before, err := ProcessorTime(t.Context(), rdb)
	if err != nil || before <= 0 {
		t.Fatal(before, err)
	}
	if err := rdb.Eval(t.Context(), "for i = 1, 3e6 do end return 1", nil).Err(); err != nil {
		t.Fatal(err)
	}
	if after, err := ProcessorTime(t.Context(), rdb); err != nil || after <= before {
		t.Errorf("%v after %v, %v", after, before, err)
	}
	in.Kill()
	if used, err := ProcessorTime(t.Context(), rdb); err == nil {
		t.Errorf("%v of a server that is gone", used)
	}
}
