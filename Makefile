# The two commands of a newcomer are `make demo` and `make stop`. Everything made lies in .mxdist/.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONTROL := .mxdist/control/bin
NODE := .mxdist/node/bin
NODE_MPI := .mxdist/node-mpi/bin
PYTEST_OPTIONS ?=
SEED ?= 0
TRIALS ?= 12
ROW ?= loop loop_pinned overhead pipeline kvstore scaling peer recover memory_resnet152 memory_bert_base

.DEFAULT_GOAL := help
.PHONY: demo stop clean environments environment-mpi check test test-layouts test-mpi test-cluster faults test-faults test-database test-system test-docker bench lock help

demo: ## Build what is missing, start the services, retrain and promote a model (MXDIST_DEMO_CONF: DAG parameters)
	@"$(PYTHON)" scripts/demo.py

stop: ## End every process that `make demo` started; the state stays
	@"$(PYTHON)" scripts/stop.py

clean: ## Stop, and remove the state: data, runs, models, passwords
	@"$(PYTHON)" scripts/stop.py --clean

environments: ## Build both environments, with the tools for tests
	@"$(PYTHON)" scripts/environments.py --dev

environment-mpi: ## Build a third: a node whose Horovod meets over MPI too (needs openmpi-bin, libopenmpi-dev)
	@"$(PYTHON)" scripts/environments.py --mpi

check: environments ## Lint, types and the walls between the rooms
	$(CONTROL)/ruff check
	$(CONTROL)/mypy
	$(CONTROL)/lint-imports

test: environments ## Unit tests, real ranks, whole jobs
	$(CONTROL)/python -m pytest tests/unit --ignore=tests/unit/runtime -n 2 --dist loadfile $(PYTEST_OPTIONS)
	$(NODE)/python -m pytest tests/unit/runtime tests/parallel tests/world -m "not layouts" -n 2 --dist loadfile $(PYTEST_OPTIONS)

test-layouts: environments ## The whole matrix: each layout against one process, examples, killed servers
	$(NODE)/python -m pytest tests/parallel tests/world -m layouts -n 2 --dist loadfile $(PYTEST_OPTIONS)

test-mpi: environment-mpi ## Ranks over MPI: the law, and what goes wrong
	$(NODE_MPI)/python -m pytest tests/mpi -n 2 --dist loadfile $(PYTEST_OPTIONS)

test-cluster: environments environment-mpi ## Three nodes with networks, disks and sshd of their own: ssh, Slurm (needs root, and what .ci/run installs)
	@"$(PYTHON)" scripts/kube_apiserver.py
	$(CONTROL)/python -m pytest tests/cluster -n 2 --dist loadfile $(PYTEST_OPTIONS)

test-faults: environments ## Kill things under a real Airflow
	$(CONTROL)/python -m pytest tests/faults $(PYTEST_OPTIONS)

faults: environments ## The kill matrix: trials of SEED, SEED+1, ... under a real Airflow (needs postgresql)
	$(CONTROL)/python -m pytest tests/matrix --seed $(SEED) --trials $(TRIALS) $(PYTEST_OPTIONS)

test-database: environments ## Airflow on PostgreSQL, two schedulers and Celery workers, killed (needs postgresql, redis-server)
	$(CONTROL)/python -m pytest tests/database $(PYTEST_OPTIONS)

test-system: environments ## The example DAGs, from end to end
	$(CONTROL)/python -m pytest tests/system $(PYTEST_OPTIONS)

test-docker: environments ## Install what the images of docker/ hold, without Docker; a node's sshd (needs openssh-server)
	$(CONTROL)/python -m pytest tests/docker $(PYTEST_OPTIONS)

bench: environments ## Speed against peers, side by side (ROW=name, see CONTRIBUTING.md; default: all)
	@for row in $(ROW); do $(CONTROL)/python bench/run.py $$row || exit 1; done

lock: environments ## Pin the requirements anew; pins that still fit stay
	@"$(PYTHON)" scripts/environments.py --lock

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile
