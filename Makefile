PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint slurm clean

# The environment: the versions of constraints.txt, the package itself editable.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# The main job: handwritten digits on two CPU processes.
demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/lightning-dp-train

test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

# A SLURM for the tests that use one; they are skipped without it.
slurm:
	tests/install_slurm.sh

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs dist
