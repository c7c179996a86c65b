# The commands of the README, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Extras that the other tests do without, in an environment of their own on top of .venv: every process starts slower with them.
EXTRAS := .venv-extras
EXTRA_BIN := $(EXTRAS)/bin
EXTRA_INSTALL := $(EXTRA_BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: run test test-all test-long test-real test-adapters test-dp test-seg test-export test-lightning walkthroughs walks fuzz lint refresh docs bench bench-gpu clean

run: $(STAMP)
	$(BIN)/fairflare run fed_lwr --overwrite

# Lines that the quick tests reach (it takes twice the time): make test COVERAGE="--cov --cov-report=term"
COVERAGE ?=
test: $(STAMP)
	$(BIN)/python -m tests.quick -n 2 --dist worksteal --durations 25 $(COVERAGE)

# Every test but those that start networks for minutes (walks).
test-all: test test-long

# Three processes on two cores: many of these tests wait for processes of their own. CI runs a quarter: make test-long PART=1/4
PART ?= 1/1
test-long: $(STAMP)
	$(BIN)/python -m pytest -m "long and not walk" -n 3 --dist worksteal --durations 25 --part $(PART)

# Tests of real images: make test-real FAIRFLARE_REAL_DATA=FOLDER
test-real: $(STAMP)
	$(BIN)/python -m pytest -m "real_data and not walk" -n 2 --dist loadfile --durations 10

# LoRA, by the extra `adapters`.
test-adapters: $(EXTRAS)/.made
	$(EXTRA_INSTALL) ".[adapters]"
	$(EXTRA_BIN)/python -m pytest -m "not walk" -n 2 tests/unit/test_adapters.py tests/unit/test_pretrained.py tests/federation/test_adapters_run.py

# Differential privacy, by the extra `dp`.
test-dp: $(EXTRAS)/.made
	$(EXTRA_INSTALL) ".[dp]"
	$(EXTRA_BIN)/python -m pytest -m "" -n 2 tests/unit/test_privacy_ledger.py tests/federation/test_private_training.py

# DICOM SEG as masks, by the extra `seg`.
test-seg: $(EXTRAS)/.made
	$(EXTRA_INSTALL) ".[seg]"
	$(EXTRA_BIN)/python -m pytest -m "" -n 2 tests/unit/test_dicom_seg.py tests/unit/test_geometry_files.py tests/unit/test_geometry.py

# Models as ONNX, by the extra `export`.
test-export: $(EXTRAS)/.made
	$(EXTRA_INSTALL) ".[export]"
	$(EXTRA_BIN)/python -m pytest -m "" -n 2 tests/unit/test_export.py

# Training loops of PyTorch Lightning, by the extra `lightning`.
test-lightning: $(EXTRAS)/.made
	$(EXTRA_INSTALL) ".[lightning]"
	$(EXTRA_BIN)/python -m pytest -m "" tests/e2e/test_lightning.py

# The walk-throughs of poc/, docs/install.md and `fairflare examples poc`, each as one script; FLARE's filters at six
# sites; POC and killed sites.
walkthroughs: $(STAMP)
	$(BIN)/python -m pytest -m walk -n 3 --dist loadgroup --durations 0 --durations-min 10 \
		tests/e2e/test_walks.py tests/e2e/test_filters.py tests/e2e/test_poc.py "tests/e2e/test_written_examples.py::test_an_example_runs[poc]"

walks: $(STAMP)
	$(BIN)/python -m pytest -m walk -n 2 --dist loadfile

# Hostile replies and bundles; CI sends 40 for each method and phase: make fuzz FUZZ="--replies 300".
FUZZ ?= --cases 5000
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(FUZZ) --workers 2

# Types for the oldest Python too; those that are installed must at least read every file.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --no-warn-unused-ignores
	for python in python3.10 python3.12 python3.13 python3.14; do if $$python -c "" 2>/dev/null; then $$python -c "import ast, pathlib; \
		[ast.parse(p.read_text(encoding='utf-8'), str(p)) for d in ('custom', 'tools', 'tests') for p in pathlib.Path(d).rglob('*.py')]" || exit 1; fi; done

# The job folders, from the declarations. A test says it changes nothing.
refresh: $(STAMP)
	$(BIN)/python tools/refresh.py
	$(BIN)/python tools/write_results.py

# The documentation as a site, in site/; a link that leads nowhere is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m mkdocs build --quiet

# What docs/performance.md is made of; one thread a process, on a machine that does nothing else. With Flower beside us:
# python3 -m venv DIR; DIR/bin/pip install "flwr[simulation]" torch monai; make bench FLOWER=DIR/bin/python
bench: export OMP_NUM_THREADS = 1
bench: $(STAMP)
	$(BIN)/python benchmarks/bench_cka.py --packages
	$(BIN)/python benchmarks/bench_cka.py --packages --case b16 --no-reference
	$(BIN)/python benchmarks/bench_phase.py --exact --samples 48 32
	$(BIN)/python benchmarks/bench_phase.py --size 96 --images 200 --repeat 1 --samples 48 32
	$(BIN)/python benchmarks/bench_phase.py --size 192 --images 50 --repeat 1
	$(BIN)/python benchmarks/bench_training.py --repeat 3
	$(BIN)/python benchmarks/bench_memory_reuse.py --repeat 1 --steps 8
	$(BIN)/python benchmarks/bench_aggregation.py --sites 8
	$(BIN)/python benchmarks/bench_trips.py
	$(BIN)/python benchmarks/bench_trips.py --bounded
	$(BIN)/python benchmarks/bench_idle.py
	$(BIN)/python benchmarks/bench_imports.py --repeat 1
	$(BIN)/python benchmarks/bench_answers.py
	$(BIN)/python benchmarks/bench_results.py
	$(BIN)/python benchmarks/bench_scale.py --rounds 2 --sites 100 1000
	$(BIN)/python benchmarks/bench_compare.py --rounds 1
	$(BIN)/python benchmarks/bench_beside.py $(if $(FLOWER),--flower-python $(FLOWER))

# All open questions about a GPU in one run of at most half an hour.
bench-gpu: export OMP_NUM_THREADS = 1
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/bench_cka.py --device cuda --packages
	$(BIN)/python benchmarks/bench_cka.py --device cuda --packages --case b32
	$(BIN)/python benchmarks/bench_training.py --paper --repeat 3
	$(BIN)/python benchmarks/bench_gpu.py
	$(BIN)/python -m pytest -m gpu tests/gpu

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,dev]"
	touch $@

$(EXTRAS)/.made: $(STAMP)
	rm -rf $(EXTRAS)
	$(BIN)/python -m venv $(EXTRAS)
	below="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	above="$$($(EXTRA_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	echo "import site; site.addsitedir('$$below')" >"$$above/venv.pth"
	touch $@

clean:
	rm -rf $(VENV) $(EXTRAS) build dist runs
