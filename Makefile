GO      ?= go
SEEDS   ?= 1000
BENCH   ?= .
COUNT   ?= 1
SYSTEMS := linux darwin windows
# How many packages are tested at once: half as many again as there are processors, because
# the tests of several packages mostly wait for real servers.
AT_ONCE := $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 3 + 1) / 2 )))
# What is in the workspace: the library, and the command line, a module of its own.
ALL     := ./cmd/leased/... ./...
# The other modules, but for the Jaeger of examples/tracing, which is nearly all other people's.
NESTED  := $(patsubst %/go.mod,%,$(wildcard examples/go.mod examples/*/go.mod adapters/*/go.mod bench/go.mod internal/measure/redlock/go.mod))

.DEFAULT_GOAL := help
.PHONY: help test test-jaeger check bench measure compare simulate mutants docs

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Tests that want a real server are skipped without redis-server in PATH;"
	@echo "with LEASED_REQUIRE_REDIS=1 they fail instead."

# The race detector multiplies the time of every test, so its pass is the short one;
# what -short leaves out is long because of its numbers, not because of other code.
# Tests that run in parallel mostly wait, so more of them run at once than there are
# processors. By default a program with the race detector sleeps for a second before it
# ends, each process that a test starts included. Collecting garbage less often saves
# about a fifth of the processor time, of the compiler and of the tests.
test: export GOGC ?= 400
test: ## vet, then all tests: short ones under the race detector, all without it
	$(GO) vet $(ALL)
	GORACE='$(GORACE) atexit_sleep_ms=50' $(GO) test -race -vet=off -short -p $(AT_ONCE) -parallel 16 -timeout 10m $(ALL)
	$(GO) test -vet=off -p $(AT_ONCE) -parallel 16 -timeout 10m $(ALL)

# Its own target, because the first run builds Jaeger. -v shows how long it takes.
test-jaeger: ## two processes and a real Jaeger, which is built first: 2 to 5 minutes, once
	cd examples/tracing && LEASED_REQUIRE_JAEGER=1 $(GO) test -v -count 1 -timeout 30m -run Jaeger .

check: ## formatting, vet for three systems, linter if installed, go.mod tidy
	@echo "gofmt"; unformatted=$$(gofmt -l .); \
	if [ -n "$$unformatted" ]; then echo "gofmt -w is needed for:"; echo "$$unformatted"; exit 1; fi
	@for system in $(SYSTEMS); do \
		echo "go vet for $$system"; GOOS=$$system $(GO) vet $(ALL) || exit 1; \
	done
	@if command -v golangci-lint >/dev/null; then \
		echo "golangci-lint"; golangci-lint run $(ALL) || exit 1; \
		for dir in $(NESTED); do \
			echo "golangci-lint in $$dir"; (cd $$dir && golangci-lint run ./...) || exit 1; \
		done; \
	else echo "golangci-lint: not installed, skipped"; fi
	@for dir in . $(NESTED) examples/tracing/jaeger; do \
		echo "go mod tidy in $$dir"; (cd $$dir && $(GO) mod tidy -diff) || exit 1; \
	done
	@echo "go mod tidy in cmd/leased"; scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	cp cmd/leased/go.mod cmd/leased/go.sum "$$scratch" && \
	$(GO) mod edit -replace github.com/leasedmutex/leased="$$PWD" "$$scratch/go.mod" && \
	cd cmd/leased && GOWORK=off $(GO) mod tidy -diff -modfile "$$scratch/go.mod"

bench: ## benchmarks against a real server: BENCH=pattern COUNT=repetitions
	LEASED_REQUIRE_REDIS=1 $(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) .

measure: ## print figures of this machine; never fails
	-$(GO) run ./internal/measure

# 10 to 15 minutes on a machine that does nothing else. The tag brings etcd in, whose packages
# take a minute to build the first time. WITH=-redisson takes up to ten minutes more, and needs
# Maven and a JDK.
compare: ## other locks beside this one, into docs/performance.md: WITH=-redisson for that too; wants redis-server
	cd bench && $(GO) run -tags etcd . $(WITH) -docs ../docs

simulate: ## random schedules of the protocol on virtual time: SEEDS=how many
	$(GO) test -run '^TestSimulation' -count 1 -timeout 0 ./internal/simulation -simulate.seeds=$(SEEDS)

# --strict makes an error of a link that leads to no page or no heading.
docs: ## the pages of docs as a web site in .site/build, with all links checked; needs Python
	@test -x .site/venv/bin/mkdocs || { python3 -m venv .site/venv && .site/venv/bin/pip install -q -r .site/requirements.txt; }
	NO_MKDOCS_2_WARNING=1 .site/venv/bin/mkdocs build --strict -f .site/mkdocs.yml

mutants: ## remove each rule of the protocol in turn; a test has to notice
	$(GO) run ./internal/mutants
