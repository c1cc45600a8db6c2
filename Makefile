# `make test` and `make demo` set themselves up: all they need is Python 3.12 and a package index.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DRAFTERS := drafters
.PHONY: test test-fast test-slow demo lint clean

$(STAMP): pyproject.toml constraints.txt scripts/find_python.sh
	python=$$(scripts/find_python.sh) && rm -rf $(VENV) && $$python -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,demo]"
	touch $@

test: test-fast test-slow

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --durations=10

demo: $(STAMP)
	$(BIN)/python examples/smollm2_demo.py

lint: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check "ruff>=0.14"
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .demo .cache build dist *.egg-info
