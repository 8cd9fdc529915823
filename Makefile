# One-line aliases; bootstrap.py and the command line hold the logic.
.PHONY: setup demo test test-fast lint types arch wheel soak clean

setup:
	python3 bootstrap.py setup --extras dev

demo:
	python3 bootstrap.py demo

test:
	python3 bootstrap.py test

test-fast:
	OMP_NUM_THREADS=1 .venv/bin/pytest -q -m "not slow and not dist and not gpu" -n 2 --dist loadfile

lint:
	.venv/bin/ruff check . && .venv/bin/ruff format --check .

types:
	.venv/bin/basedpyright --level error

arch:
	.venv/bin/lint-imports

wheel:
	.venv/bin/python -m build --wheel --no-isolation

soak:
	python3 bootstrap.py soak

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
