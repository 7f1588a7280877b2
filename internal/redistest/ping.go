package redistest

import (
	"bufio"
	"crypto/tls"
	"net"
	"strconv"
	"strings"
	"time"
)

// answers reports whether the server at addr is the process pid and accepts commands.
// The pid distinguishes it from a stranger that won the race for the port. A server that
// wants a password reveals its pid to nobody, so it is taken to be the right one.
// If secret is nil, the connection is unencrypted.
func answers(addr string, pid int, secret *tls.Config) bool {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	if secret != nil {
		c = tls.Client(c, secret)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte("PING\r\nINFO server\r\n")); err != nil {
		return false
	}
	lines := bufio.NewScanner(c)
	if !lines.Scan() {
		return false
	}
	if strings.HasPrefix(lines.Text(), "-NOAUTH") {
		return true
	}
	if lines.Text() != "+PONG" {
		return false // still loading
	}
	for lines.Scan() {
		if text, ok := strings.CutPrefix(lines.Text(), "process_id:"); ok {
			return text == strconv.Itoa(pid)
		}
		if strings.HasPrefix(lines.Text(), "-") {
			return true // INFO is denied or renamed
		}
	}
	return false
}
