package simulation

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/alicebob/miniredis/v2"
	mini "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"

	"github.com/leasedmutex/leased/internal/redisserver"
)

// simServer runs the real scripts on an embedded server's keys without a connection and with one
// Lua interpreter for all of them: miniredis makes a new interpreter for each script, which costs
// several times as much as the script itself. simServer is a hook of a go-redis client, so that
// redisserver.Server works on it unchanged.
//
// TestTheSimulatedServerAnswersLikeTheEmbeddedOne compares the two.
type simServer struct {
	mini  *miniredis.Miniredis
	state *lua.LState
	peer  *mini.Peer
	out   bytes.Buffer
	buf   *bufio.Writer
	in    *bufio.Reader
	known map[string]*lua.FunctionProto // scripts that the server has seen, by SHA-1
	texts map[string]*lua.FunctionProto // scripts by text
	slow  bool                          // miniredis itself runs the scripts
	// stop, if set, is called before each command or pipeline. If it returns an error, that is the
	// result, and the server sees nothing. If it returns silent, too, a pipeline returns the error but
	// its commands look as if they had been answered, as with go-redis when the connection itself is
	// refused.
	stop func() (err error, silent bool)
	wait func() (int64, error) // what WAIT returns; nil if the server has no replicas
}

// simStatus is a reply such as OK.
type simStatus = mini.Simple

// simAnswer is an error with which Redis answers.
type simAnswer string

func (e simAnswer) Error() string { return string(e) }
func (simAnswer) RedisError()     {}

func newSimServer(m *miniredis.Miniredis) *simServer {
	s := &simServer{mini: m, known: map[string]*lua.FunctionProto{}, texts: map[string]*lua.FunctionProto{}}
	s.buf = bufio.NewWriter(&s.out)
	s.peer = mini.NewPeer(s.buf)
	s.in = bufio.NewReader(&s.out)
	s.state = lua.NewState()
	module := s.state.NewTable()
	module.RawSetString("call", s.state.NewFunction(func(l *lua.LState) int { return s.command(l, true) }))
	module.RawSetString("pcall", s.state.NewFunction(func(l *lua.LState) int { return s.command(l, false) }))
	s.state.SetGlobal("redis", module)
	text := s.state.GetGlobal("string").(*lua.LTable)
	text.RawSetString("match", s.state.NewFunction(matcher(text.RawGetString("match").(*lua.LFunction))))
	return s
}

// matcher is string.match with each pattern parsed only once. The interpreter would parse it at
// every call, which takes a quarter of a script's time.
func matcher(slow *lua.LFunction) lua.LGFunction {
	known := map[string]*regexp.Regexp{}
	return func(l *lua.LState) int {
		text, pattern := l.Get(1), l.Get(2)
		re, seen := known[pattern.String()]
		if !seen {
			re = inGo(pattern.String())
			known[pattern.String()] = re
		}
		if _, isText := text.(lua.LString); !isText || re == nil || l.GetTop() > 2 {
			n := l.GetTop()
			l.Push(slow)
			for i := range n {
				l.Push(l.Get(i + 1))
			}
			l.Call(n, lua.MultRet)
			return l.GetTop() - n
		}
		found := re.FindStringSubmatch(string(text.(lua.LString)))
		if found == nil {
			l.Push(lua.LNil)
			return 1
		}
		if len(found) > 1 {
			found = found[1:]
		}
		for _, part := range found {
			l.Push(lua.LString(part))
		}
		return len(found)
	}
}

// inGo translates a Lua pattern into a regular expression. It returns nil if the pattern has
// something that the scripts do not use.
func inGo(pattern string) *regexp.Regexp {
	var re strings.Builder
	re.WriteString("(?s)")
	set := false
	for i := 0; i < len(pattern); i++ {
		c := pattern[i]
		switch {
		case c == '%' && i+1 < len(pattern):
			i++
			class := map[byte]string{'d': "0-9", 'w': "A-Za-z0-9", 'S': "^\\t-\\r "}[pattern[i]]
			switch {
			case class == "", set && pattern[i] == 'S':
				return nil
			case set:
				re.WriteString(class)
			default:
				re.WriteString("[" + class + "]")
			}
		case c == '[' || c == ']':
			set = c == '['
			re.WriteByte(c)
		case c == '-' && !set, c >= 0x80, strings.IndexByte("{}|\\", c) >= 0:
			return nil
		default:
			re.WriteByte(c)
		}
	}
	compiled, err := regexp.Compile(re.String())
	if err != nil {
		return nil
	}
	return compiled
}

func (s *simServer) close() { s.state.Close() }

// do sends one plain command. It returns nil, an int, a string, a []any or an error.
func (s *simServer) do(args ...string) any {
	s.out.Reset()
	s.mini.Server().Dispatch(s.peer, args)
	s.buf.Flush()
	s.in.Reset(&s.out)
	reply, err := mini.ParseReply(s.in)
	if err != nil {
		return simAnswer(err.Error())
	}
	return reply
}

// command is redis.call if raise is set, and redis.pcall otherwise.
func (s *simServer) command(l *lua.LState, raise bool) int {
	args := make([]string, l.GetTop())
	for i := range args {
		switch a := l.Get(i + 1).(type) {
		case lua.LNumber:
			args[i] = a.String()
		case lua.LString:
			args[i] = string(a)
		default:
			l.RaiseError("arguments must be strings or integers")
		}
	}
	reply := s.do(args...)
	if err, failed := reply.(simAnswer); failed {
		if raise {
			l.Error(lua.LString(err), 1)
			return 0
		}
		t := l.NewTable()
		t.RawSetString("err", lua.LString(err))
		l.Push(t)
		return 1
	}
	l.Push(toLua(l, reply))
	return 1
}

func toLua(l *lua.LState, reply any) lua.LValue {
	switch r := reply.(type) {
	case nil:
		return lua.LFalse
	case int:
		return lua.LNumber(r)
	case string:
		return lua.LString(r)
	case mini.Simple:
		t := l.NewTable()
		t.RawSetString("ok", lua.LString(r))
		return t
	case []any:
		t := l.CreateTable(len(r), 0)
		for _, each := range r {
			t.Append(toLua(l, each))
		}
		return t
	}
	panic(fmt.Sprintf("a reply of type %T", reply))
}

func fromLua(v lua.LValue) (any, error) {
	switch v := v.(type) {
	case lua.LBool:
		if v {
			return int64(1), nil
		}
		return nil, redis.Nil
	case lua.LNumber:
		return int64(v), nil
	case lua.LString:
		return string(v), nil
	case *lua.LTable:
		if e, ok := v.RawGetString("err").(lua.LString); ok {
			return nil, simAnswer(e)
		}
		if s, ok := v.RawGetString("ok").(lua.LString); ok {
			return string(s), nil
		}
		all := make([]any, 0, v.Len())
		for i := 1; ; i++ {
			each := v.RawGetInt(i)
			if each == lua.LNil {
				return all, nil
			}
			one, err := fromLua(each)
			if err != nil && err != redis.Nil {
				return nil, err
			}
			all = append(all, one)
		}
	}
	return nil, redis.Nil
}

// forgetScripts empties the cache of scripts.
func (s *simServer) forgetScripts() {
	clear(s.known)
	s.do("SCRIPT", "FLUSH") // of miniredis, which runs them if s.slow
}

// eval runs a script as EVAL and EVALSHA do.
func (s *simServer) eval(args []any) (any, error) {
	proto := s.known[args[1].(string)]
	if args[0] == "eval" {
		text := args[1].(string)
		if proto = s.texts[text]; proto == nil {
			chunk, err := parse.Parse(strings.NewReader(text), "script")
			if err == nil {
				proto, err = lua.Compile(chunk, "script")
			}
			if err != nil {
				return nil, simAnswer("ERR " + err.Error())
			}
			s.texts[text] = proto
		}
		s.known[simSHA(text)] = proto
	}
	if proto == nil {
		return nil, simAnswer("NOSCRIPT No matching script. Please use EVAL.")
	}
	n := args[2].(int)
	keys, argv := s.state.CreateTable(n, 0), s.state.CreateTable(len(args)-3-n, 0)
	for i, a := range args[3:] {
		if t := keys; i < n {
			t.Append(lua.LString(fmt.Sprint(a)))
		} else {
			argv.Append(lua.LString(a.(string)))
		}
	}
	s.state.SetGlobal("KEYS", keys)
	s.state.SetGlobal("ARGV", argv)
	defer s.state.SetTop(0)
	s.state.Push(s.state.NewFunctionFromProto(proto))
	if err := s.state.PCall(0, 1, nil); err != nil {
		text := err.Error()
		if e, ok := err.(*lua.ApiError); ok {
			text = e.Object.String()
		}
		return nil, simAnswer(text)
	}
	return fromLua(s.state.Get(-1))
}

func simSHA(text string) string {
	for _, s := range []*redisserver.Script{&redisserver.AcquireScript, &redisserver.ReleaseScript, &redisserver.YieldScript, &redisserver.DowngradeScript, &redisserver.CancelScript, &redisserver.EvictScript,
		&redisserver.InspectScript, &redisserver.VoteAcquireScript, &redisserver.VoteYieldScript, &redisserver.VoteDowngradeScript, &redisserver.AdoptScript,
		&redisserver.VoteCancelScript, &redisserver.RenewScript, &redisserver.RenewSharedScript} {
		if s.Text == text {
			return s.Sha.(string)
		}
	}
	panic("a script that the library does not know")
}

// DialHook, ProcessHook and ProcessPipelineHook make simServer a redis.Hook.
func (s *simServer) DialHook(next redis.DialHook) redis.DialHook {
	if s.slow {
		return next
	}
	return func(context.Context, string, string) (net.Conn, error) { panic("the simulation needs no connection") }
}

func (s *simServer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if s.stop != nil {
			if err, _ := s.stop(); err != nil {
				cmd.SetErr(err)
				return err
			}
		}
		if s.slow {
			return next(ctx, cmd)
		}
		return s.process(cmd)
	}
}

func (s *simServer) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if s.stop != nil {
			if err, silent := s.stop(); err != nil {
				for _, cmd := range cmds {
					if !silent {
						cmd.SetErr(err)
					}
				}
				return err
			}
		}
		wait, _ := cmds[len(cmds)-1].(*redis.IntCmd)
		if wait != nil && wait.Name() == "wait" { // the embedded server does not know it
			cmds = cmds[:len(cmds)-1]
		} else {
			wait = nil
		}
		first := s.all(ctx, next, cmds)
		if wait != nil {
			n, err := s.wait()
			wait.SetVal(n)
			wait.SetErr(err)
			if first == nil {
				first = err
			}
		}
		return first
	}
}

// all runs the commands of a pipeline, and returns the first error.
func (s *simServer) all(ctx context.Context, next redis.ProcessPipelineHook, cmds []redis.Cmder) (first error) {
	if s.slow {
		return next(ctx, cmds)
	}
	for _, cmd := range cmds {
		if err := s.process(cmd); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (s *simServer) process(cmd redis.Cmder) error {
	args := cmd.Args()
	switch args[0] {
	case "eval", "evalsha":
		v, err := s.eval(args)
		if err != nil {
			cmd.SetErr(err)
			return err
		}
		cmd.(interface{ SetVal(any) }).SetVal(v)
		return nil
	}
	all := make([]string, len(args))
	for i, a := range args {
		switch a := a.(type) {
		case string:
			all[i] = a
		case int:
			all[i] = strconv.Itoa(a)
		case int64:
			all[i] = strconv.FormatInt(a, 10)
		default:
			panic(fmt.Sprintf("an argument of type %T", a))
		}
	}
	if err, failed := s.do(all...).(simAnswer); failed {
		cmd.SetErr(err)
		return err
	}
	return nil // nobody needs the answers of plain commands
}
