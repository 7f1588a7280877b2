package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TLSServer is [Server] that accepts only TLS. Its clients need a certificate; those made from
// Options have one. If the server program was built without TLS, tb is skipped.
func TLSServer(tb testing.TB, args ...string) *Instance {
	tb.Helper()
	program, dir := need(tb), tb.TempDir()
	clients, files, err := certificates(dir)
	if err != nil {
		tb.Fatal(err)
	}
	return startFor(tb, plan{program: program, dir: dir, tls: clients, lacking: withoutTLS, args: func(port int) ([]string, error) {
		own := append(usualArgs(0), "--tls-port", strconv.Itoa(port), "--tls-auth-clients", "yes")
		return append(append(own, files...), args...), nil
	}})
}

// withoutTLS reports whether the server did not start because its program was built without TLS.
func withoutTLS(err error) bool {
	// Servers up to Redis 7.0 say the first, later ones the second.
	return errors.Is(err, errEnded) && (strings.Contains(err.Error(), "tls-port") || strings.Contains(err.Error(), "Failed finding TLS support"))
}

// certificates makes an authority and two certificates, for the server and for its clients.
// It returns the clients' configuration and the server's arguments.
func certificates(dir string) (*tls.Config, []string, error) {
	authority, err := newCertificate("authority", nil)
	if err != nil {
		return nil, nil, err
	}
	server, err := newCertificate("server", authority)
	if err != nil {
		return nil, nil, err
	}
	client, err := newCertificate("client", authority)
	if err != nil {
		return nil, nil, err
	}
	var args []string
	for option, content := range map[string]struct {
		kind, file string
		der        []byte
	}{
		"--tls-ca-cert-file": {"CERTIFICATE", "ca.crt", authority.cert.Raw},
		"--tls-cert-file":    {"CERTIFICATE", "server.crt", server.cert.Raw},
		"--tls-key-file":     {"PRIVATE KEY", "server.key", server.keyDER},
	} {
		file := filepath.Join(dir, content.file)
		text := pem.EncodeToMemory(&pem.Block{Type: content.kind, Bytes: content.der})
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return nil, nil, err
		}
		args = append(args, option, file)
	}
	roots := x509.NewCertPool()
	roots.AddCert(authority.cert)
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		ServerName:   "127.0.0.1",
		RootCAs:      roots,
		Certificates: []tls.Certificate{{Certificate: [][]byte{client.cert.Raw}, PrivateKey: client.key}},
	}, args, nil
}

type certificate struct {
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	keyDER []byte
}

// newCertificate makes a certificate signed by by. If by is nil, it makes a self-signed authority.
func newCertificate(name string, by *certificate) (*certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: "redistest " + name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	c := &certificate{key: key}
	if by == nil {
		template.IsCA, template.BasicConstraintsValid = true, true
		template.KeyUsage |= x509.KeyUsageCertSign
		by = &certificate{cert: template, key: key}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, &key.PublicKey, by.key)
	if err != nil {
		return nil, err
	}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	c.keyDER, err = x509.MarshalPKCS8PrivateKey(key)
	return c, err
}
