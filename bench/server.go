package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// server is one redis-server on a loopback port, or the server that a contender brings along.
// Each measurement has a new one, so none inherits keys, scripts or connections.
type server struct {
	addr string
	dir  string
	cmd  *exec.Cmd
	rdb  *redis.Client // nil if the server is not Redis
	own  *worker       // runs the contender's own server
}

// startServer starts a server on one processor. The caller stops it.
func startServer(ctx context.Context, c contender, cpu int) (*server, error) {
	base := "/dev/shm" // in memory, if the system has it, because disks are not compared here
	if _, err := os.Stat(base); err != nil {
		base = ""
	}
	dir, err := os.MkdirTemp(base, "leased-bench")
	if err != nil {
		return nil, err
	}
	s := &server{dir: dir}
	if c.serve != nil {
		s.own, err = startWorker(role{Serve: true, Contender: c.name, Dir: dir}, cpu)
		if err == nil {
			var ready answer
			if ready, err = s.own.hear(30 * time.Second); err == nil {
				s.addr = ready.Addr
				return s, nil
			}
		}
		s.stop()
		return nil, err
	}
	// A port that is free now can be taken before the server binds it.
	for try := 0; ; try++ {
		if err = s.startRedis(ctx, cpu); err == nil || try == 3 || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		s.stop()
		return nil, err
	}
	return s, nil
}

func (s *server) startRedis(ctx context.Context, cpu int) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.addr = l.Addr().String()
	_, port, err := net.SplitHostPort(s.addr)
	if err = errors.Join(err, l.Close()); err != nil {
		return err
	}
	s.cmd = exec.Command(redisServer(), "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
		"--dir", s.dir, "--maxclients", "30000", "--loglevel", "warning",
		"--slowlog-log-slower-than", strconv.FormatInt(slow.Microseconds(), 10), "--slowlog-max-len", "100000")
	s.cmd.Stdout, s.cmd.Stderr = io.Discard, os.Stderr
	if err := startOn(s.cmd, cpu); err != nil {
		s.cmd = nil
		return err
	}
	s.rdb = redis.NewClient(&redis.Options{Addr: s.addr, MaxRetries: -1})
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		err := s.rdb.Ping(ctx).Err()
		if err == nil {
			return nil
		}
		if time.Since(began) > 10*time.Second || ctx.Err() != nil {
			s.kill()
			return err
		}
	}
}

// redisServer returns the server's program, which need not be the one in PATH.
func redisServer() string {
	if path := os.Getenv("LEASED_REDIS_SERVER"); path != "" {
		return path
	}
	return "redis-server"
}

func (s *server) kill() {
	if s.rdb != nil {
		_ = s.rdb.Close()
		s.rdb = nil
	}
	if s.cmd != nil {
		_ = s.cmd.Process.Kill() // it has nothing to save
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

func (s *server) stop() {
	s.kill()
	if s.own != nil {
		s.own.kill()
	}
	_ = os.RemoveAll(s.dir)
}

// spent is what a server has done until an instant.
type spent struct {
	at       time.Time
	requests float64 // reads from its clients' sockets: a pipeline is one read
	cpu      time.Duration
	dataset  float64 // bytes
	keys     float64
}

func (s *server) spent(ctx context.Context) (spent, error) {
	if s.rdb == nil {
		return spent{at: time.Now()}, nil
	}
	keys, err := s.rdb.DBSize(ctx).Result()
	if err != nil {
		return spent{}, err
	}
	text, err := s.rdb.Info(ctx).Result()
	if err != nil {
		return spent{}, err
	}
	info := map[string]float64{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			if n, err := strconv.ParseFloat(value, 64); err == nil {
				info[name] = n
			}
		}
	}
	return spent{
		keys:     float64(keys),
		at:       time.Now(),
		requests: info["total_reads_processed"],
		cpu:      time.Duration((info["used_cpu_user"] + info["used_cpu_sys"]) * 1e9),
		dataset:  info["used_memory_dataset"],
	}, nil
}

// since returns what the server has done since before, without the two commands of spent itself.
func (s spent) since(before spent) spent {
	return spent{
		at:       s.at,
		requests: max(0, s.requests-before.requests-2),
		cpu:      s.cpu - before.cpu,
		dataset:  s.dataset - before.dataset,
	}
}

// slow is how long a command has to take for the server to note it.
const slow = 50 * time.Microsecond

// forgetSlow clears what longest reads.
func (s *server) forgetSlow(ctx context.Context) error {
	if s.rdb == nil {
		return nil
	}
	return s.rdb.Do(ctx, "slowlog", "reset").Err()
}

// longest returns for how long the longest command has kept the server from all others, or slow if
// none took that long. The commands of spent do not count.
func (s *server) longest(ctx context.Context) (time.Duration, error) {
	if s.rdb == nil {
		return 0, nil
	}
	all, err := s.rdb.SlowLogGet(ctx, 100_000).Result()
	most := slow
	for _, one := range all {
		if len(one.Args) > 0 && !strings.EqualFold(one.Args[0], "info") && !strings.EqualFold(one.Args[0], "slowlog") {
			most = max(most, one.Duration)
		}
	}
	return most, err
}

// left returns how long the lock of that name remains in Redis. Some libraries name the key differently;
// then it is the key that expires first.
func (s *server) left(ctx context.Context, name string) (time.Duration, error) {
	if ttl, err := s.rdb.PTTL(ctx, name).Result(); err != nil || ttl > 0 {
		return ttl, err
	}
	keys, err := s.rdb.Keys(ctx, "*").Result()
	if err != nil {
		return 0, err
	}
	var least time.Duration
	for _, key := range keys {
		ttl, err := s.rdb.PTTL(ctx, key).Result()
		if err != nil {
			return 0, err
		}
		if ttl > 0 && (least == 0 || ttl < least) {
			least = ttl
		}
	}
	if least == 0 {
		return 0, fmt.Errorf("no key of %s has a TTL: %v", name, keys)
	}
	return least, nil
}

// version returns the version that the Redis server reports.
func version(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, redisServer(), "--version").Output()
	if err != nil {
		return "unknown"
	}
	for _, word := range strings.Fields(string(out)) {
		if v, ok := strings.CutPrefix(word, "v="); ok {
			return filepath.Base(redisServer()) + " " + v
		}
	}
	return strings.TrimSpace(string(out))
}
