# Each target works alone on a fresh clone: what it needs is installed first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check lint types contracts wheel plans schema constraints format clean

demo: $(READY)
	$(BIN)/placewise demo

test: $(READY)
	$(BIN)/pytest -q -n auto

check: lint types contracts wheel test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/pyright --warnings

contracts: $(READY)
	PYTHONPATH=.src $(BIN)/lint-imports

wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	$(BIN)/check-wheel-contents dist

# What is committed and can be made again; a test compares each with what would be made.
plans: $(READY)
	PYTHONPATH=.src $(BIN)/python -m placewise.tests.example_plans

schema: $(READY)
	$(BIN)/placewise schema > plans/schema.json

constraints: $(READY)
	(echo '# What is tested, so that a fresh machine gets the same. Written by `make constraints`.'; \
	 $(BIN)/pip freeze --exclude-editable | sed 's/+cpu//') > constraints.txt

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
