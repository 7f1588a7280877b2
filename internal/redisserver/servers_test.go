package redisserver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/leasedmutex/leased/internal/protocol"
	"github.com/leasedmutex/leased/internal/redistest"
	"github.com/leasedmutex/leased/internal/redistest/around"
)

var (
	callOfCommand = regexp.MustCompile(`\bp?call\('([A-Z]+)'(?:, ([^,)]+))?`)
	namedKey      = regexp.MustCompile(`^KEYS\[[1-6]\]$`)
)

// Proxies of managed clusters parse a script before they run it, and require that each key is
// written as KEYS[n]. The only other thing that a command can be about is a channel, which is not a
// key: its name is built from an argument and a client's name.
func TestKeysAreNamedInScriptsAsProxiesWantThem(t *testing.T) {
	files, err := fs.Glob(scriptFiles, "scripts/*.lua")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	seen := 0
	for _, file := range files {
		text, err := scriptFiles.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, m := range callOfCommand.FindAllStringSubmatch(line, -1) {
				command, about := m[1], m[2]
				switch {
				case command == "TIME" && about == "":
				case (command == "PUBLISH" && (about == "ARGV[1] .. client" || about == "channel")) || (command == "PUBSUB" && about == "'NUMSUB'"):
				case namedKey.MatchString(about):
					seen++
				default:
					t.Errorf("%s:%d: %s is about %s, which is not written KEYS[n]", file, i+1, command, about)
				}
			}
		}
	}
	if seen < 80 {
		t.Errorf("%d calls about keys were found: the pattern misses some", seen)
	}
}

// numbers is a hook that has scripts read the clock and scores as they do on Dragonfly, where these are
// numbers and not text.
type numbers struct{}

const numbersFirst = `
local given = redis
local function read(answer, command, ...)
  local about = table.concat({ ... }, ' ')
  if type(answer) == 'table' then
    local scores = string.find(about, ' WITHSCORES$')
    for i, value in ipairs(answer) do
      if command == 'TIME' or scores and i % 2 == 0 then answer[i] = tonumber(value) end
    end
  elseif answer and (command == 'ZSCORE' or command == 'ZADD' and string.find(about, ' INCR ')) then
    return tonumber(answer)
  end
  return answer
end
local redis = setmetatable({
  call = function(...) return read(given.call(...), ...) end,
  pcall = function(...) return read(given.pcall(...), ...) end,
}, { __index = given })
`

// byText has a script sent with the lines above in front of it.
func (numbers) byText(cmd redis.Cmder) {
	if line := cmd.Args(); cmd.Name() == "evalsha" || cmd.Name() == "eval" {
		for _, script := range todays {
			if line[1] == script.Sha || line[1] == script.Text {
				line[0], line[1] = "eval", numbersFirst+script.Text.(string)
				break
			}
		}
	}
}

func (numbers) DialHook(next redis.DialHook) redis.DialHook { return next }

func (n numbers) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		n.byText(cmd)
		return next(ctx, cmd)
	}
}

func (n numbers) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			n.byText(cmd)
		}
		return next(ctx, cmds)
	}
}

// answers is a hook that stands in for a server: it answers each script with the same error.
type answers struct{ text string }

func (h answers) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h answers) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if strings.HasPrefix(cmd.Name(), "eval") {
			cmd.SetErr(answerError(h.text))
			return answerError(h.text)
		}
		return next(ctx, cmd)
	}
}

func (h answers) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func TestTheFirstAnswerOfAServerThatLacksSomethingSaysWhat(t *testing.T) {
	keys, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ answer, says string }{
		{"ERR Error running script (call to f_1): @user_script:14: @user_script: 14: Write commands not allowed after non deterministic commands. Call redis.replicate_commands() at the start of your script in order to switch to single commands replication mode.", "lua-replicate-commands"},
		{"ERR Error running script (call to f_1): @user_script:11: @user_script: 11: This Redis command is not allowed from scripts", "TIME"},
		{"ERR This Redis command is not allowed from script script: 5d9bf0, on @user_script:13.", "TIME"},
		{"ERR Error running script (call to f_1): @user_script:30: @user_script: 30: Unknown Redis command called from Lua script", "does not know a command"},
		{"ERR Unknown Redis command called from script script: 5d9bf0, on @user_script:30.", "does not know a command"},
		{"ERR Unknown command called from script script: 5d9bf0, on @user_script:30.", "does not know a command"}, // Valkey 8
		{"ERR Could not find scripting engine 'lua'", "Lua"},
		{"ERR This instance has Lua scripting support disabled", "Lua"}, // Garnet
		{"ERR unknown command 'evalsha', with args beginning with: 'x'", "EVAL"},
		{"ERR unknown command `EVALSHA`, with args beginning with: `x`, ", "EVAL"},
		{"ERR bad lua script for redis cluster, all the keys that the script uses should be passed using the KEYS array, and KEYS should not be in expression", "proxy"},
		{"ERR Protocol error: unauthenticated multibulk length", "Password"},
		{"MOVED 8157 127.0.0.1:7001", "redis.NewClusterClient"},
		{"ERR This instance has cluster support disabled", "redis.NewClient"},
		{"redis: all sentinels specified in configuration are unreachable: ERR unknown command 'sentinel', with args beginning with: 'get-master-addr-by-name'", "Sentinel"},
		{"redis: all sentinels specified in configuration are unreachable: redis: nil", "MasterName"},
		{"redis: all sentinels specified in configuration are unreachable: redis: nil\nredis: nil", "MasterName"},
		{"failed to enable maintnotifications: ERR unknown subcommand 'maint_notifications'. Try CLIENT HELP.", "ModeAuto"},
		{"failed to enable maintnotifications: ERR Unknown subcommand or wrong number of arguments for 'maint_notifications'. Try CLIENT HELP.", "ModeAuto"},
		{"failed to enable maintnotifications: server does not support RESP3 (HELLO command failed)", "ModeAuto"},
	} {
		rdb := redis.NewClient(redistest.Options("127.0.0.1:1"))
		rdb.AddHook(answers{c.answer})
		s := New(rdb, "")
		s.Rdb = rdb // New uses a clone, and go-redis clones without hooks
		_, err := s.Do(t.Context(), &keys, &protocol.Command{Verb: protocol.Acquire, ID: "leased1:w:1000:u:AAAAAAAAAAAAAAAA:BBBBBBBBBBBBBBBB:here", Wait: true})
		var lacks *LackingError
		if !errors.As(err, &lacks) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), strings.ReplaceAll(c.answer, "\n", "; ")) {
			t.Errorf("%q: %v", c.answer, err)
		}
		if fail := Classify(err); fail == nil || fail.Kind != protocol.NeedsOperator {
			t.Errorf("%q is waited for: %+v", c.answer, fail)
		}
		_ = rdb.Close()
	}
	for _, passing := range []string{"LOADING Redis is loading the dataset in memory", "BUSY Redis is busy running a script", "TRYAGAIN Multiple keys request during rehashing of slot",
		"failed to enable maintnotifications: LOADING Redis is loading the dataset in memory",
		"redis: all sentinels specified in configuration are unreachable: redis: nil\ndial tcp 127.0.0.1:1: connect: connection refused"} {
		if _, missing := lacking(answerError(passing)); missing {
			t.Errorf("%q is taken for something that a server lacks", passing)
		}
	}
}

// rewords is a hook that puts each error into one of its own, as a hook that names the command may.
type rewords struct{}

func (rewords) DialHook(next redis.DialHook) redis.DialHook { return next }

func (rewords) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return reworded(cmd, next(ctx, cmd)) }
}

func (rewords) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			cmd.SetErr(reworded(cmd, cmd.Err()))
		}
		return err
	}
}

func reworded(cmd redis.Cmder, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s failed: %v", cmd.Name(), err)
}

func TestAServerLearnsTheScriptsAlsoWhereAHookRewordsItsReplies(t *testing.T) {
	keys, err := protocol.NewKeys("", "x")
	if err != nil {
		t.Fatal(err)
	}
	rdb := redistest.MiniClient(t, redistest.Mini(t), func(o *redis.Options) { o.ContextTimeoutEnabled = true })
	rdb.AddHook(rewords{})
	s := New(rdb, "")
	id := protocol.NewRequest(protocol.NewClientID("a"), protocol.Exclusive, time.Minute, false, protocol.Counted, protocol.Origin{}).ID
	a, err := s.Do(t.Context(), &keys, &protocol.Command{Verb: protocol.Acquire, ID: id, TTL: time.Minute, Wait: true})
	if err != nil || a.Outcome != protocol.Granted {
		t.Errorf("%+v, %v", a, err)
	}
	renewals := []protocol.Renewal{{Keys: &keys, Req: protocol.Request{ID: id, TTL: time.Minute}}} // in a pipeline
	s.Renew(t.Context(), renewals)
	if renewals[0].Err != nil || renewals[0].Outcome != protocol.Granted {
		t.Errorf("%+v", renewals[0])
	}
}

func TestTheErrorsOfOneNodesClientAreNamedAlsoInsideAnotherType(t *testing.T) {
	rdb := redistest.MiniClient(t, redistest.Mini(t), func(o *redis.Options) { o.PoolSize = 1 })
	one := New(around.Node{Client: rdb}, "")
	conn := rdb.Conn() // the only one
	if err := conn.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	if err := one.explain(context.DeadlineExceeded); !errors.Is(err, redis.ErrPoolTimeout) {
		t.Errorf("the pool is exhausted, and the error is %v", err)
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	moved := answerError("MOVED 8157 127.0.0.1:7001")
	if err := one.explain(moved); !errors.As(err, new(*LackingError)) {
		t.Errorf("the node is part of a Cluster, and the error is %v", err)
	}
	if err := rdb.Close(); err != nil {
		t.Fatal(err)
	}
	if err := one.Ping(t.Context()); !errors.Is(err, ErrRedisClosed) {
		t.Errorf("the client is closed, and the error is %v", err)
	}

	cluster := New(redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}}), "")
	defer cluster.Rdb.Close()
	if err := cluster.explain(redis.ErrClosed); errors.Is(err, ErrRedisClosed) {
		t.Error("a node that left its Cluster goes for a closed client")
	}
	if err := cluster.explain(moved); errors.As(err, new(*LackingError)) {
		t.Error("a slot that moves goes for a mistake of the client's")
	}
}
