// Package query asks Jaeger for traces and finds in its answers who waited for whom.
package query

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Answer is what Jaeger's /api/traces returns.
type Answer struct {
	Data   []*Trace `json:"data"`
	Errors []struct {
		Msg string `json:"msg"`
	} `json:"errors"`
}

// Trace is all that belongs to one order.
type Trace struct {
	TraceID   string             `json:"traceID"`
	Spans     []*Span            `json:"spans"`
	Processes map[string]Process `json:"processes"`
}

// Span is one piece of work. Its times are in µs, the start since 1970.
type Span struct {
	TraceID       string      `json:"traceID"`
	SpanID        string      `json:"spanID"`
	OperationName string      `json:"operationName"`
	References    []Reference `json:"references"`
	StartTime     int64       `json:"startTime"`
	Duration      int64       `json:"duration"`
	Tags          []Tag       `json:"tags"`
	Logs          []Log       `json:"logs"`
	ProcessID     string      `json:"processID"`
}

// Reference is a span's parent (CHILD_OF), or a link (FOLLOWS_FROM).
type Reference struct {
	RefType string `json:"refType"`
	TraceID string `json:"traceID"`
	SpanID  string `json:"spanID"`
}

// Log is an event of a span.
type Log struct {
	Timestamp int64 `json:"timestamp"`
	Fields    []Tag `json:"fields"`
}

// Tag is an attribute.
type Tag struct {
	Key   string `json:"key"`
	Value any    `json:"value"`
}

// Process is what sent a span.
type Process struct {
	ServiceName string `json:"serviceName"`
	Tags        []Tag  `json:"tags"`
}

// Jaeger is the query side of a Jaeger, at an address such as http://localhost:16686.
type Jaeger struct{ URL string }

const (
	askFor    = 10 * time.Second // the longest that one question may take
	maxAnswer = 64 << 20
)

// Since returns the service's traces that began after a time, at most limit.
func (j Jaeger) Since(ctx context.Context, service string, began time.Time, limit int) (*Answer, error) {
	answer, _, err := j.ask(ctx, url.Values{
		"service": {service},
		"start":   {strconv.FormatInt(began.UnixMicro(), 10)},
		"end":     {strconv.FormatInt(time.Now().Add(time.Minute).UnixMicro(), 10)},
		"limit":   {strconv.Itoa(limit)},
	})
	return answer, err
}

// Traces returns the traces with these ids, also in Jaeger's own words.
func (j Jaeger) Traces(ctx context.Context, ids ...string) (*Answer, []byte, error) {
	return j.ask(ctx, url.Values{"traceID": ids})
}

func (j Jaeger) ask(ctx context.Context, question url.Values) (*Answer, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, j.URL+"/api/traces?"+question.Encode(), http.NoBody)
	if err != nil {
		return nil, nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return nil, nil, err
	}
	answer, err := Parse(text)
	if response.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("answer %s of Jaeger: %.200s", response.Status, text)
	}
	return answer, text, err
}

// Parse reads an answer that was kept.
func Parse(text []byte) (*Answer, error) {
	var answer Answer
	if err := json.Unmarshal(text, &answer); err != nil {
		return nil, fmt.Errorf("this is not an answer from Jaeger: %w", err)
	}
	if len(answer.Errors) > 0 {
		return nil, fmt.Errorf("refused by Jaeger: %s", answer.Errors[0].Msg)
	}
	return &answer, nil
}
