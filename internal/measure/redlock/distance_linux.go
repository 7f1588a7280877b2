package main

import (
	"fmt"
	"net"
	"runtime"
	"syscall"
	"time"
	"unsafe"
)

// delay runs a proxy for each of the addresses, calls ready with the proxies' addresses, and passes
// on what it reads from a server and for it, in order, after that server's oneWay. It returns only
// with an error.
//
// One thread does everything, without Go's network poller and timers. These wake an idle process up
// to a millisecond late, and would pass each message from one goroutine to another on the
// processors that are measured. The delay of a server is always the same, so what was read first is
// due first, and one queue for each server keeps the order of every connection. The thread waits in
// epoll_pwait2 until there is something to read or the earliest head of the queues is due; the
// kernel is accurate to about a microsecond once the thread has asked for no timer slack.
//
// It writes to blocking sockets, because messages are far smaller than a socket's buffer.
func delay(addrs []string, oneWay []time.Duration, ready func(own []string) error) error {
	runtime.LockOSThread()
	const setTimerSlack = 29 // PR_SET_TIMERSLACK
	if _, _, e := syscall.RawSyscall(syscall.SYS_PRCTL, setTimerSlack, 1, 0); e != 0 {
		return fmt.Errorf("prctl: %w", e)
	}
	epoll, err := syscall.EpollCreate1(0)
	if err != nil {
		return err
	}
	p := &delayer{epoll: epoll, listeners: map[int]*line{}, ends: map[int]end{}}
	var own []string
	for i, addr := range addrs {
		at, err := p.listen(addr, oneWay[i])
		if err != nil {
			return err
		}
		own = append(own, at)
	}
	if err := ready(own); err != nil {
		return err
	}
	return p.run()
}

type delayer struct {
	epoll     int
	lines     []*line
	listeners map[int]*line // by socket
	ends      map[int]end   // by the socket of a connection
	spare     [][]byte
}

// line is the proxy of one server.
type line struct {
	server syscall.SockaddrInet4
	oneWay time.Duration
	queue  []delayed
}

// end says where the text of a connection goes: through a line, to the peer's connection.
type end struct {
	line *line
	to   int
}

// delayed is text that was read from a connection and is due on its peer; without text, it is the
// connection's end.
type delayed struct {
	at   time.Time
	to   int
	text []byte
}

func (p *delayer) listen(addr string, oneWay time.Duration) (string, error) {
	server, err := net.ResolveTCPAddr("tcp4", addr)
	if err != nil {
		return "", err
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	here := syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
	if err := syscall.Bind(fd, &here); err != nil {
		return "", err
	}
	if err := syscall.Listen(fd, 512); err != nil {
		return "", err
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		return "", err
	}
	l := &line{server: syscall.SockaddrInet4{Port: server.Port}, oneWay: oneWay}
	copy(l.server.Addr[:], server.IP.To4())
	p.lines = append(p.lines, l)
	p.listeners[fd] = l
	return fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port), p.watch(fd)
}

func (p *delayer) watch(fd int) error {
	return syscall.EpollCtl(p.epoll, syscall.EPOLL_CTL_ADD, fd, &syscall.EpollEvent{Events: syscall.EPOLLIN, Fd: int32(fd)})
}

// accept accepts a client's connection and connects it to the server.
func (p *delayer) accept(listener int, l *line) error {
	client, _, err := syscall.Accept4(listener, syscall.SOCK_CLOEXEC)
	if err != nil {
		return err
	}
	server, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := syscall.Connect(server, &l.server); err != nil {
		return err
	}
	p.ends[client], p.ends[server] = end{l, server}, end{l, client}
	for _, fd := range []int{client, server} {
		if err := syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1); err != nil {
			return err
		}
		if err := p.watch(fd); err != nil {
			return err
		}
	}
	return nil
}

func (p *delayer) run() error {
	events := make([]syscall.EpollEvent, 256)
	for {
		n, err := p.wait(events)
		if err != nil {
			return err
		}
		now := time.Now()
		for _, e := range events[:n] {
			if l, listens := p.listeners[int(e.Fd)]; !listens {
				p.read(int(e.Fd), now)
			} else if err := p.accept(int(e.Fd), l); err != nil {
				return err
			}
		}
		for _, l := range p.lines {
			for len(l.queue) > 0 && !time.Now().Before(l.queue[0].at) {
				p.write(l.queue[0])
				l.queue = l.queue[1:]
			}
		}
	}
}

// wait waits until there is something to read or something is due.
func (p *delayer) wait(events []syscall.EpollEvent) (int, error) {
	const epollPwait2 = 441 // the same on all architectures
	var timeout *syscall.Timespec
	var first time.Time
	for _, l := range p.lines {
		if len(l.queue) > 0 && (first.IsZero() || l.queue[0].at.Before(first)) {
			first = l.queue[0].at
		}
	}
	if !first.IsZero() {
		left := syscall.NsecToTimespec(max(0, time.Until(first).Nanoseconds()))
		timeout = &left
	}
	// A raw call, so that afterwards the runtime does not have to find a processor for the thread.
	n, _, e := syscall.RawSyscall6(epollPwait2, uintptr(p.epoll), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)),
		uintptr(unsafe.Pointer(timeout)), 0, 0)
	switch {
	case e == syscall.EINTR:
		return 0, nil
	case e != 0:
		return 0, fmt.Errorf("epoll_pwait2: %w", e)
	}
	return int(n), nil
}

const maxAtOnce = 16 << 10

func (p *delayer) read(fd int, now time.Time) {
	var buffer []byte
	if n := len(p.spare); n > 0 {
		buffer, p.spare = p.spare[n-1], p.spare[:n-1]
	} else {
		buffer = make([]byte, maxAtOnce)
	}
	n, _, _ := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&buffer[0])), uintptr(len(buffer)))
	if int(n) <= 0 { // the connection has ended; an error counts as its end
		_ = syscall.EpollCtl(p.epoll, syscall.EPOLL_CTL_DEL, fd, nil)
		n = 0
	}
	e := p.ends[fd]
	e.line.queue = append(e.line.queue, delayed{now.Add(e.line.oneWay), e.to, buffer[:n]})
}

func (p *delayer) write(d delayed) {
	for text := d.text; len(text) > 0; {
		n, _, e := syscall.RawSyscall6(syscall.SYS_SENDTO, uintptr(d.to), uintptr(unsafe.Pointer(&text[0])), uintptr(len(text)), syscall.MSG_NOSIGNAL, 0, 0)
		if e != 0 {
			break // its reader has gone
		}
		text = text[n:]
	}
	if len(d.text) == 0 {
		// The sockets stay open: the process ends with the run and need not reuse their numbers.
		_ = syscall.Shutdown(d.to, syscall.SHUT_WR)
	}
	p.spare = append(p.spare, d.text[:cap(d.text)])
}
