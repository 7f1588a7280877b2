package main

import (
	"bytes"
	"database/sql"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"
)

func TestABuyerIsNotToldWhatFailed(t *testing.T) {
	var logged bytes.Buffer
	log.SetOutput(&logged)
	defer log.SetOutput(os.Stderr)
	const database = "127.0.0.1:1" // where nobody listens
	db, err := sql.Open("pgx", "postgres://seller@"+database+"/test")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	answer := httptest.NewRecorder()
	s := &shop{stock: store{db}, answer: time.Minute}
	s.routes().ServeHTTP(answer, httptest.NewRequest(http.MethodPost, "/buy?buyer=a", nil))
	if body := answer.Body.String(); answer.Code != http.StatusServiceUnavailable || body != "try again later\n" {
		t.Errorf("the buyer is answered %d %q", answer.Code, body)
	}
	if !strings.Contains(logged.String(), database) {
		t.Errorf("the log says %q", logged.String())
	}
}
