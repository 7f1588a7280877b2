package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
)

// Redisson is a library for Java. Its workers are the program in the directory redisson, which Maven
// builds, so it takes part only on request: go run . -redisson.
func init() {
	contenders = append(contenders, contender{
		name: "Redisson", optional: "redisson", shares: true,
		settings: "a library for Java: `RLock` and `RReadWriteLock` with its defaults, its watchdog included. Each JVM did for nine " +
			"seconds what it was measured at then. Clients that compete for one lock have a connection pool and a " +
			"subscription each, but share a JVM, for several JVMs would wait for each other's compilers; the owner of a hand-off and its waiter, and an " +
			"owner that is killed, are in two. Memory is what lives in the heap",
		program:  redissonWorker,
		version:  redissonVersion,
		together: true,
		warms:    true,
	})
}

// redissonAt is the directory of its program, relative to the one in which this program is run.
const redissonAt = "redisson"

// buildRedisson has Maven download what the worker needs and build it. If it is built already, this takes
// some seconds.
func buildRedisson(ctx context.Context) error {
	for _, tool := range []string{"mvn", "java"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("for Redisson there have to be Maven and a JDK of version 17 or later: %w", err)
		}
	}
	if _, err := os.Stat(filepath.Join(redissonAt, "pom.xml")); err != nil {
		return errors.New("to measure Redisson, run this in the directory bench")
	}
	out, err := exec.CommandContext(ctx, "mvn", "-B", "-q", "-f", filepath.Join(redissonAt, "pom.xml"), "process-classes").CombinedOutput()
	if err != nil {
		return fmt.Errorf("the worker of Redisson cannot be built by Maven: %w\n%s", err, out)
	}
	return nil
}

func redissonWorker() []string {
	target := filepath.Join(redissonAt, "target")
	path := filepath.Join(target, "classes") + string(filepath.ListSeparator) + filepath.Join(target, "lib", "*")
	return []string{"java", "-cp", path, "bench.Worker"}
}

// redissonVersion returns the version that pom.xml requires.
func redissonVersion() string {
	text, err := os.ReadFile(filepath.Join(redissonAt, "pom.xml"))
	if err != nil {
		return ""
	}
	found := regexp.MustCompile(`<redisson\.version>([^<]+)<`).FindSubmatch(text)
	if found == nil {
		return ""
	}
	return "v" + string(found[1])
}
