package redisserver

import "testing"

// FuzzParseAnswer parses replies made of arbitrary numbers and strings.
func FuzzParseAnswer(f *testing.F) {
	f.Add(int64(1), int64(7), int64(7), int64(0), int64(15000), "leased1:w:1:u:a:b", 8)
	f.Add(int64(2), int64(7), int64(7), int64(3), int64(-1), "someone else", 12)
	f.Add(int64(1), int64(1<<53), int64(7), int64(0), int64(15000), "9007199254740992", 9)
	f.Add(int64(2), int64(1<<53), int64(7), int64(3), int64(15000), "someone else", 12)
	f.Add(int64(5), int64(0), int64(0), int64(0), int64(0), "", 5)
	f.Add(int64(-1), int64(-1), int64(-1), int64(-1), int64(-1), "", 0)
	f.Fuzz(func(t *testing.T, kind, a, b, c, d int64, text string, n int) {
		all := []any{kind, a, b, c, d, text, c, d, a, b, kind, c, nil}
		for _, reply := range [][]any{all[:min(max(n, 0), len(all))], {text}, {text, nil, a}, {kind, text, []any{a}, nil}} {
			if answer, err := parseAnswer(reply); err == nil && answer.Token >= 1<<53 {
				t.Errorf("%v: %+v", reply, answer)
			}
		}
	})
}

func TestAnAnswerWhoseTokenIsTooLargeIsMalformed(t *testing.T) {
	for token, ok := range map[int64]bool{1<<53 - 1: true, 1 << 53: false, -1: false} {
		reply := []any{int64(codeGranted), token, int64(7), int64(0), int64(0), int64(0), int64(0), int64(0), int64(-1)}
		if answer, err := parseAnswer(reply); (err == nil) != ok {
			t.Errorf("%d: %+v, %v", token, answer, err)
		}
	}
}
