# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.

override ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
PYTHON3 ?= python3
BIN := $(ROOT)/.venv/bin
IN_ROOT := cd "$(ROOT)" &&
# What takes longest first, so that both workers end together.
TEST_FOLDERS = $(wildcard $(foreach part,engine server browser unit,$(ROOT)/tests/$(part)))

# A file at a time for each of two processes. Tests count; what measures times is a benchmark.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test test-slow test-platforms boundscheck unit gpu soak attack ray clients versions next check reference options counters coverage map pictures screenshots site format release clean distclean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' "$(ROOT)/Makefile" | expand -t 18

install:  ## set up .venv (a second time: nothing to do)
	@$(PYTHON3) "$(ROOT)/tools/install.py"

demo: install  ## a program on stock vLLM and on vLLM with the plugin, side by side
	@$(IN_ROOT) exec "$(BIN)/sgl-vllm" demo

test: check  ## lint, types and the tests: pure parts, pages, the engine, the server
	@$(IN_ROOT) "$(BIN)/python" -m pytest $(PARALLEL) --durations 40 $(TEST_FOLDERS)
	@$(IN_ROOT) ! nvidia-smi -L >/dev/null 2>&1 || exec "$(BIN)/python" -m pytest tests/gpu

# Files of many short tests last: a process gets its next file when two tests are left of its own, so
# a file may wait for the one long test of another while the other process has nothing left to do.
test-slow: boundscheck  ## slow tests: examples, the demo, the tutorial, servers of their own
	@$(IN_ROOT) TRITON_INTERPRET=1 OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest tests/unit/kernels
	@$(IN_ROOT) exec "$(BIN)/python" -m pytest -m "slow and not (nightly or platforms)" $(PARALLEL) --durations 30 \
		$(addprefix tests/,server unit browser engine)

test-platforms: install  ## engine tests on the V2 runner and with asynchronous scheduling
	@$(IN_ROOT) exec "$(BIN)/python" -m tests.platforms $(PARALLEL)

# numba caches loops with checks and without them under the same name.
boundscheck: export NUMBA_BOUNDSCHECK = 1
boundscheck: export NUMBA_CACHE_DIR = $(ROOT)/.boundscheck
boundscheck: install  ## structured output, with a check of every access to an array (minutes)
	@$(IN_ROOT) "$(BIN)/python" -m pytest -n 2 tests/unit/fsm
	@$(IN_ROOT) SGL_VLLM_TEST_EFFORT=11 exec "$(BIN)/python" -m pytest -m "nightly or not nightly" tests/unit/fsm/test_format_fuzz.py

unit: install  ## the tests of the pure parts (a minute)
	@$(IN_ROOT) exec "$(BIN)/python" -m pytest $(PARALLEL) tests/unit

gpu:  ## on a machine with CUDA: tests, kernel times, comparison with stock (docs/gpu.md)
	@$(IN_ROOT) exec $(PYTHON3) tools/gpu/suite.py

soak: install  ## nightly: what CI leaves out, ten times the random examples, 20,000 requests compared with stock
	@$(IN_ROOT) "$(BIN)/python" -m pytest -m nightly $(PARALLEL) $(addprefix tests/,server engine unit browser)
	@$(IN_ROOT) "$(BIN)/python" -m tests.platforms --all $(PARALLEL)
	@$(IN_ROOT) SGL_VLLM_TEST_EFFORT=10 "$(BIN)/python" -m pytest "$(ROOT)/tests/unit"
	@$(IN_ROOT) SGL_VLLM_TEST_EFFORT=250 "$(BIN)/python" -m pytest tests/unit/fsm/test_schema_fuzz.py
	@$(IN_ROOT) "$(BIN)/python" -m tests.engine.soak

attack: install  ## hostile requests to a real server: its memory, other clients, its end (half an hour)
	@$(IN_ROOT) exec "$(BIN)/python" -m tools.attack

ray: install  ## the tests of replicas on Ray Serve, which it installs (0.4 GB; minutes)
	@$(IN_ROOT) "$(BIN)/python" -m pip install --quiet --no-deps --requirement constraints/ray.txt
	@$(IN_ROOT) exec "$(BIN)/python" -m pytest "$(ROOT)/tests/ray"

clients: install  ## run the clients of docs/clients.md and write its table (installs them: 1.4 GB)
	@$(IN_ROOT) WRITE_CLIENTS=1 "$(BIN)/python" -m pytest -m slow tests/server/test_clients.py
	@$(IN_ROOT) "$(BIN)/python" -m tools.clients

versions: install  ## the demo and tests/engine on every supported vLLM (1 GB; an hour)
	@$(IN_ROOT) exec "$(BIN)/python" -m tools.vllm_versions test --write

next: install  ## what another vLLM has moved, by hook: make next VLLM="FOLDER_OR_WHEEL ..."
	@$(IN_ROOT) exec "$(BIN)/python" -m tools.vllm_contact $(VLLM)

check: install  ## ruff (lint and format) and mypy, the examples included
	@$(IN_ROOT) "$(BIN)/ruff" check .
	@$(IN_ROOT) "$(BIN)/ruff" format --check .
	@$(IN_ROOT) "$(BIN)/mypy"
	@$(IN_ROOT) "$(BIN)/mypy" --config-file tools/mypy.ini

reference: install  ## write docs/reference.md from the code's docstrings
	@$(IN_ROOT) "$(BIN)/python" tools/reference.py

options: install  ## write the tables of docs/options.md from sgl_vllm/config.py
	@$(IN_ROOT) "$(BIN)/python" -m tools.options

counters: install  ## write the table of metrics in docs/operations.md from the code
	@$(IN_ROOT) "$(BIN)/python" -m tools.counters

coverage: install  ## write the tables of docs/support.md and the README from what the parts answer
	@$(IN_ROOT) "$(BIN)/python" -m tools.support

map: install  ## write the map of packages in CONTRIBUTING.md from their docstrings
	@$(IN_ROOT) "$(BIN)/python" -m tools.source_tree

pictures: install  ## draw the README's chart and terminal, and the pictures of docs/primitives.md
	@$(IN_ROOT) "$(BIN)/python" -m tools.pictures
	@$(IN_ROOT) "$(BIN)/python" -m tools.chart
	@$(IN_ROOT) "$(BIN)/python" -m tools.recording

screenshots: install  ## take the screenshots in docs/screenshots; needs chromium
	@$(IN_ROOT) WRITE_SCREENSHOTS=1 "$(BIN)/python" -m pytest -m nightly tests/browser/test_screenshots.py

site: install  ## build the documentation site in site/; warnings and broken links are errors
	@$(IN_ROOT) exec "$(BIN)/python" -m tools.site

format: install  ## format the code with ruff
	@$(IN_ROOT) "$(BIN)/ruff" check --fix .
	@$(IN_ROOT) "$(BIN)/ruff" format .

release: install  ## build, check and test a release in dist/, and print how to publish it
	@$(IN_ROOT) exec "$(BIN)/python" -m tools.release

clean:  ## remove caches and build leftovers
	@cd "$(ROOT)" && rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .boundscheck
	@find "$(ROOT)" -name __pycache__ -not -path '*/.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## and .venv
	@rm -rf "$(ROOT)/.venv"
