PYTHON ?= python3
VENV := .venv
VLLM_VENV := .venv-vllm
ARGS ?=

# Every target builds its environment first; this takes a fraction of a second if nothing changed.
BOOTSTRAP := $(PYTHON) scripts/bootstrap.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm test-browser soak screenshots lint ruff mypy clean env env-vllm

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: env ## run the demonstration (ARGS="..." goes to `peagle demo`)
	@$(VENV)/bin/peagle demo $(ARGS)

# Without ARGS, test files are spread over several processes. With ARGS there is one process, which starts faster.
test: env ## run the tests (ARGS="..." goes to pytest)
	@$(VENV)/bin/python -m pytest $(or $(ARGS),-n auto --dist loadfile)

test-vllm: env-vllm ## run the tests against stock vLLM on the CPU, in an environment of their own
	@VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \
		$(VLLM_VENV)/bin/python -m pytest -m vllm tests/parity $(ARGS)

test-browser: env ## run the browser tests in headless Chromium (Debian: apt-get install chromium)
	@$(VENV)/bin/python -m pytest -m browser tests/report/test_report_browser.py tests/server/test_playground_browser.py $(ARGS)

# A small KV cache is fully used within seconds, so that later memory growth is a leak. In float32 a text does not depend
# on the requests beside it; the default dtype of some CPUs is bfloat16.
soak: env ## load a server with clients that disconnect; fails on lost requests or leaks (ARGS="--seconds 300")
	@$(VENV)/bin/python scripts/serve_load.py --mode soak --clients 12 --tokens 12 --dtype float32 \
		$(or $(ARGS),--seconds 150) -- --max-model-len 512 --kv-cache-memory-bytes 134217728

screenshots: env ## take the report pictures of the documentation (ARGS="RESULT.json ...")
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
