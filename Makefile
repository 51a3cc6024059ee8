PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
ARGS ?=

# Each target asks bootstrap for its environment; when nothing changed that takes a fraction of a second.
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm test-browser soak screenshots lint ruff mypy clean env env-vllm

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: env ## run the demonstration (ARGS="..." goes to `peagle demo`)
	@$(VENV)/bin/peagle demo $(ARGS)

# All the tests go to several processes, file by file, so that none makes another's fixtures; with ARGS it is one process,
# since a few tests are over before others would have started (ARGS="-n auto --dist loadfile ..." for many).
test: env ## run the tests (ARGS="..." goes to pytest)
	@$(VENV)/bin/python -m pytest $(or $(ARGS),-n auto --dist loadfile)

test-vllm: env-vllm ## run the tests against stock vLLM on the CPU, in an environment of their own
	@VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
		$(VLLM_VENV)/bin/python -m pytest -m vllm tests/parity $(ARGS)

test-browser: env ## run the tests of pages in headless Chromium (Debian: apt-get install chromium)
	@$(VENV)/bin/python -m pytest -m browser tests/report/test_report_browser.py tests/server/test_playground_browser.py $(ARGS)

# The cache is small: its pages count as memory only once they are used, and all of them soon are.
soak: env ## minutes of clients that come, ask and hang up: nothing lost, memory flat (ARGS="--seconds 300")
	@$(VENV)/bin/python scripts/serve_load.py --mode soak --clients 12 --tokens 12 \
		$(or $(ARGS),--seconds 150) -- --max-model-len 512 --kv-cache-memory-bytes 134217728

screenshots: env ## take the documentation's pictures of a report (ARGS="RESULT.json ...")
	@$(VENV)/bin/python scripts/screenshots.py $(ARGS)

lint: ruff mypy ## check style (ruff) and types (mypy)
ruff: env
	@$(VENV)/bin/ruff check .
mypy: env
	@$(VENV)/bin/mypy

clean: ## delete the environments, build outputs and caches
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find peagle scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

env:
	@$(BOOTSTRAP) $(VENV) --extra dev

env-vllm:
	@$(BOOTSTRAP) $(VLLM_VENV) --vllm
