package redisserver

import (
	"regexp"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// What Redis says when it refuses a command begins with a code, such as NOPERM, and goes on with a
// sentence. Some replies repeat arguments of the command, and so the name of a lock, which may be called
// NOPERM. So a code is looked for only where Redis puts one, and a sentence only in what Redis says itself.

// refusal is one reply of Redis that is an error.
type refusal struct {
	code string // "" if there is none, or if only the text of an error tells of the reply
	text string // without what Redis repeats
}

// hasCode reports whether err is, or wraps, a reply with one of the codes.
func hasCode(err error, codes ...string) bool {
	return slices.ContainsFunc(refusalsIn(err), func(r refusal) bool { return slices.Contains(codes, r.code) })
}

// says reports whether err is, or wraps, a reply that contains one of the sentences.
func says(err error, sentences ...string) bool {
	return slices.ContainsFunc(refusalsIn(err), func(r refusal) bool {
		return slices.ContainsFunc(sentences, func(s string) bool { return strings.Contains(r.text, s) })
	})
}

// Replied reports whether err is, or wraps, a reply that contains sentence. Unlike says, it finds nothing in
// the text of an error that wraps no reply: whoever made it may have put the name of a lock there.
func Replied(err error, sentence string) bool {
	return err != nil && slices.ContainsFunc(collectReplies(nil, err), func(r refusal) bool { return strings.Contains(r.text, sentence) })
}

// refusalsIn returns the replies that err is or wraps: each Sentinel, for example, may have sent one. If
// there is none, the text of err may still tell of one, because a hook has put it into an error of its own,
// or because the error would otherwise match that of a context, see ofNetwork.
func refusalsIn(err error) []refusal {
	if err == nil {
		return nil
	}
	replies := collectReplies(nil, err)
	if replies == nil {
		replies = []refusal{{text: withoutRepeated(err.Error())}}
	}
	return replies
}

func collectReplies(replies []refusal, err error) []refusal {
	if answer, is := err.(redis.Error); is && err != redis.Nil { //nolint:errorlint // this unwraps
		replies = append(replies, parseRefusal(answer.Error()))
	}
	switch e := err.(type) { //nolint:errorlint // this unwraps
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			replies = collectReplies(replies, inner)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			if inner != nil {
				replies = collectReplies(replies, inner)
			}
		}
	}
	return replies
}

// ahead is what a server puts before the reply to a command inside a script:
//
//	ERR Error running script (call to f_6b…): @user_script:1: WRONGTYPE …                Redis 6.2, call
//	ERR Error running script (call to f_6b…): @user_script:1: @user_script: 1: -OOM …    Redis 6.2, refused by the script engine
//	@user_script: 1: -READONLY …                                                         the same, from pcall
//	ERR WRONGTYPE …                                                                      miniredis
//	ERR running script (call to f_6b…): @user_script:39: Invalid argument: WRONGTYPE …   Kvrocks
//	EXECABORT Transaction discarded because of: READONLY …                               in a transaction of a hook or proxy
//
// Redis 7 and Valkey put nothing there.
var ahead = regexp.MustCompile(`^(?:EXECABORT Transaction discarded because of: )?(?:ERR )?(?:(?:Error )?running script \(call to \w*\): )?(?:@user_script: ?\d+: )*(?:Invalid argument: )?-?(?:ERR )?`)

// code is what the code of a reply looks like.
var code = regexp.MustCompile(`^[A-Z]+\b`)

func parseRefusal(text string) refusal {
	return refusal{code.FindString(text[len(ahead.FindString(text)):]), withoutRepeated(text)}
}

// repeated is what Redis repeats of a command: the arguments of one that it does not know and, from Redis
// 7.2 on, the name of a key or channel that a script may not use. An error of several Sentinels has a line
// for each.
var repeated = regexp.MustCompile(`(with args beginning with: |permissions to access the ').*`)

func withoutRepeated(text string) string { return repeated.ReplaceAllString(text, "$1") }
