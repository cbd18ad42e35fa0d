# `make help` lists the targets. Everything runs in .venv: `make install` makes it with what a service needs, and the
# targets that need the tools of development (tests, types, documentation) add those.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell scripts/find_python.sh)
BIN := .venv/bin
INSTALLED := .venv/.installed
DEVELOPING := .venv/.installed-dev
SOURCES := pdserve contract runtime checkpoints engine kv_transfer worker router prefill_worker decode_worker gateway simulator ops experiments tests scripts

.PHONY: help install demo docs reference test lint types floors unit test-cluster soak simulate bench-engine bench-sampling bench-transfer bench-abuse bench-dispatch bench-served bench-api bench-strangers bench-overload bench-gateways bench-router bench-flips bench-codec validate-plan validate-choices proto tiny clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(INSTALLED)  ## make .venv with what serving, measuring and the client need

# Modules are compiled when they are first imported: most never are, and compiling all takes longer than the demo.
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)"
	"$(PYTHON)" -m venv .venv
	$(PIP_INSTALL) -e '.[service]'
	@touch $@

$(DEVELOPING): $(INSTALLED)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## serve the tiny model on a local Ray, 1 prefill + 1 decode worker, and show what the hand-off costs
	$(BIN)/pdserve demo

# On 2 cores three processes are quickest, as many tests wait. The checks run beside them.
TEST_PROCESSES ?= 3
unexport PYTHONDONTWRITEBYTECODE  # they start hundreds of processes that import the same modules

test: $(DEVELOPING)  ## lint, types, floors and all tests
	$(MAKE) --no-print-directory -j2 unit checks

.PHONY: checks
checks: lint types floors

lint: $(DEVELOPING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEVELOPING)
	$(BIN)/mypy

floors: $(DEVELOPING)
	$(BIN)/lint-imports --no-logo

unit: $(DEVELOPING)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'not soak and not cluster'

test-cluster: $(DEVELOPING)  ## `ray up` and what follows, on hosts made of namespaces, and the wheel elsewhere (root; about 25 minutes)
	scripts/cluster_test_tools.sh
	$(BIN)/python -m pytest -m cluster --timeout 300 -rA --durations 10 tests

soak: $(DEVELOPING)  ## long tests, run by hand
	$(BIN)/python -m pytest -m soak --timeout 3600 --log-cli-level INFO

SEEDS ?= 10000
simulate: $(INSTALLED)  ## the service in a simulated world, under SEEDS seeds (docs/correctness.md)
	$(BIN)/pdserve simulate --seeds $(SEEDS)

# `python -m experiments.benchmarks.NAME --quick` is the smallest form of each: does it run? Tests run all of them.
bench-engine: $(DEVELOPING)  ## the engine beside transformers and the floor of this machine, on one core (about 10 minutes)
	$(BIN)/python -m experiments.benchmarks.engine

bench-sampling: $(DEVELOPING)  ## sampling a batch of 32 rows over a vocabulary of 128k, on one core (half a minute)
	$(BIN)/python -m experiments.benchmarks.sampling

bench-transfer: $(DEVELOPING)  ## transports and hand-offs beside memcpy, raw TCP, NIXL and Mooncake (about 8 minutes)
	$(BIN)/python -m experiments.benchmarks.transfer

bench-abuse: $(DEVELOPING)  ## what abuse of one client, and of strangers, costs others; fairness; a burst of streams (about 20 minutes)
	$(BIN)/python -m experiments.benchmarks.abuse --only abuse,fairness,burst

bench-dispatch: $(DEVELOPING)  ## what disaggregation adds to TTFT, idle and beside a busy decode (about 4 minutes)
	$(BIN)/python -m experiments.benchmarks.dispatch

bench-api: $(DEVELOPING)  ## HTTP beside gRPC: time to first token, CPU time per token (about 3 minutes)
	$(BIN)/python -m experiments.benchmarks.api

bench-gateways: $(DEVELOPING)  ## two gateways beside one, and how soon a stream goes on when one is killed (about 2 minutes)
	$(BIN)/python -m experiments.benchmarks.front_door --only gateways

bench-flips: $(DEVELOPING)  ## goodput after a load step, with and without the controller of roles (about 5 minutes)
	$(BIN)/python -m experiments.benchmarks.role_flips

bench-router: $(DEVELOPING)  ## the front door with stub workers beside a bare echo, on one core (about 8 minutes)
	$(BIN)/python -m experiments.benchmarks.front_door --only router

bench-overload: $(DEVELOPING)  ## goodput at twice the load that is borne, and from a cancel to free blocks (about 4 minutes)
	$(BIN)/python -m experiments.benchmarks.overload

bench-strangers: $(DEVELOPING)  ## what 1,000 connections of strangers cost requests (about 7 minutes)
	$(BIN)/python -m experiments.benchmarks.abuse --only strangers

bench-served: $(DEVELOPING)  ## beside vLLM as 1P1D over NIXL; VLLM=VENV with its CPU build (12 to 15 minutes)
	$(BIN)/python -m experiments.benchmarks.served --vllm "$(VLLM)"

bench-vllm: $(DEVELOPING)  ## pdserve around vLLM beside its proxy and its connector; VLLM=VENV as above, PROXY=FILE (40 minutes)
	$(BIN)/python -m experiments.benchmarks.vllm --vllm "$(VLLM)" $(if $(PROXY),--proxy "$(PROXY)")

bench-codec: $(DEVELOPING)  ## what coding KV on slow links saves, and what it costs (about 5 minutes)
	$(BIN)/python -m experiments.benchmarks.codec

validate-plan: $(DEVELOPING)  ## what `pdserve plan` predicts beside what a service does; VLLM=VENV: one of vLLM (15 to 25 minutes)
	$(BIN)/python -m experiments.benchmarks.plan$(if $(VLLM), --vllm "$(VLLM)")

validate-choices: $(DEVELOPING)  ## whether the deployment that `pdserve plan` prefers is the best one when measured (root; about 40 minutes)
	$(BIN)/python -m experiments.benchmarks.choices

docs: $(DEVELOPING)  ## the documentation as a site with search in out/site (`python -m http.server -d out/site` serves it)
	$(BIN)/python -m scripts.docs_site

reference: $(DEVELOPING)  ## write the tables of limits, ports and metrics in docs/ from the code
	$(BIN)/python -m scripts.reference

proto:  ## regenerate pb/ from proto/pdserve/pb/
	scripts/gen_proto.sh

tiny: $(DEVELOPING)  ## train models/tiny again (about 40 minutes on one core)
	$(BIN)/python scripts/train_tiny.py

clean:  ## remove .venv and caches
	rm -rf .venv .venv-proto .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache out
