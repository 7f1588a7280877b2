package query

import "testing"

const answer = `{"data":[
 {"traceID":"a","processes":{"p1":{"serviceName":"orders","tags":[{"key":"service.instance.id","value":"one"}]}},"spans":[
  {"traceID":"a","spanID":"1","operationName":"POST","startTime":100,"duration":900,"processID":"p1"},
  {"traceID":"a","spanID":"2","operationName":"leased.hold","startTime":200,"duration":700,"processID":"p1",
   "references":[{"refType":"CHILD_OF","traceID":"a","spanID":"1"}],
   "tags":[{"key":"leased.token","value":1795260785374722}],
   "logs":[{"timestamp":300,"fields":[{"key":"event","value":"wanted"}]}]}]},
 {"traceID":"b","processes":{"p1":{"serviceName":"orders","tags":[]}},"spans":[
  {"traceID":"b","spanID":"3","operationName":"leased.wait","startTime":400,"duration":600,"processID":"p1",
   "references":[{"refType":"CHILD_OF","traceID":"b","spanID":"9"},{"refType":"FOLLOWS_FROM","traceID":"a","spanID":"2"},
                 {"refType":"FOLLOWS_FROM","traceID":"gone","spanID":"2"}]}]}]}`

func TestALinkLeadsFromTheWaitToTheHold(t *testing.T) {
	a, err := Parse([]byte(answer))
	if err != nil {
		t.Fatal(err)
	}
	pairs := a.Pairs()
	if len(pairs) != 1 {
		t.Fatalf("got %d pairs, want the one whose hold is in the answer", len(pairs))
	}
	p := pairs[0]
	if p.Wait.SpanID != "3" || p.Hold.SpanID != "2" || p.Waiter.TraceID != "b" || p.Holder.TraceID != "a" {
		t.Errorf("got %+v", p)
	}
	if !p.Between() || p.Holder.Sender(p.Hold) != "one" || p.Waiter.Sender(p.Wait) != "orders" {
		t.Errorf("the processes are %s and %s", p.Holder.Sender(p.Hold), p.Waiter.Sender(p.Wait))
	}
	if got, want := p.Share(), 500.0/600; got != want {
		t.Errorf("%v of the wait was spent on the hold, want %v", got, want)
	}
	if got := p.Hold.Tag("leased.token"); got != "1795260785374722" {
		t.Errorf("the token is %s: digits were lost", got)
	}
	if e := p.Hold.Events(); len(e) != 1 || e[0] != "wanted" {
		t.Errorf("the events are %q", e)
	}
	if root := p.Holder.Parent(p.Hold); root == nil || root.SpanID != "1" || p.Holder.Depth(p.Hold) != 1 {
		t.Errorf("the hold's parent is %+v", root)
	}
	if parent := p.Waiter.Parent(p.Wait); parent != nil {
		t.Errorf("the wait's parent is not in the answer, and yet %+v", parent)
	}
}
