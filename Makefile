# The same commands for people and for CI.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-matrix check fix bench soak clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/installed  ## an agent that remembers, next to one that does not
	$(BIN)/python -m llama_index_memory_tiers.demo $(if $(CHAT),--chat '$(CHAT)') $(if $(LLM),--llm '$(LLM)')

check: $(VENV)/installed  ## format, lint, imports, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy --python-version 3.10
	$(BIN)/mypy --python-version 3.13

fix: $(VENV)/installed  ## let the tools mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One more try on a machine that others load, shown as "rerun": a fault fails twice.
test: check  ## everything that must hold
	$(BIN)/pytest -n 2 --dist loadgroup --reruns 1

# What touches LlamaIndex, with the lowest and the newest core that are supported, each in an environment of its own.
test-matrix:  ## the supported versions of llama-index-core
	for core in '==0.14.25' '>=0.14.25,<0.15'; do \
		rm -rf .matrix && $(PYTHON) -m venv .matrix && \
		.matrix/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' "llama-index-core$$core" && \
		.matrix/bin/pytest -n 2 --reruns 1 tests/test_upstream_promises.py tests/test_host.py tests/test_stock_wrongs.py \
			tests/contracts || exit 1; \
	done; rm -rf .matrix

bench: $(VENV)/installed  ## speed and recall next to stock, in one run
	$(BIN)/python -m benchmarks --postgres

soak: $(VENV)/installed  ## the long form of the crash and concurrency tests
	MEMORY_TIERS_SOAK=1 $(BIN)/pytest tests/test_crashes.py tests/test_concurrency.py tests/test_chaos.py tests/test_fault_matrix.py \
		tests/test_isolation_fuzz.py tests/properties/test_machine.py tests/test_mutations.py -x

clean:
	rm -rf $(VENV) .matrix build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
