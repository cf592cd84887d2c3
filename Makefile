# make demo       run the examples (on the GPU if there is one)
# make test       GPU tests where there is a Hopper GPU, a share of the kernels on the software GPU (drawn anew each
#                 day, FLASH_MASK_SIM_SEED=N draws another; none if nothing that they depend on changed), CPU tests
# make test-all   the same, and every test of them; then those that depend on torch with the oldest and the newest
#                 torch of docs/support.md (6 GB each), the whole tables of compiled calls and of groups of processes,
#                 those with the files of serving engines (400 MB), and those of models of transformers with both ends
#                 of its range (2 GB each)
# make docs       the pages as a site, in site/, with an API reference from the docstrings; a broken link fails it
# make plan-rows  plan a grid of calls, print what differs from the kept plans, and keep the new ones
# make wheel      build the wheel in dist/, install it with torch WHEEL_TORCH in a fresh environment, run its doctor there
# make release    write VERSION=... where it is named, commit and tag it
# make lint       ruff check, ruff format --check, mypy
#
# Which Python: PYTHON=... if given. Otherwise `python3`, if it already has every module that the target needs (so a
# GPU machine with its own torch is used as it is, and needs no network); otherwise .venv, which is made when missing.

VENV := .venv
STAMP := $(VENV)/.installed
RUNTIME := torch cutlass tvm_ffi
TOOLS := pytest xdist hypothesis numpy einops ruff mypy
SITE := mkdocs mkdocstrings mkdocstrings_handlers ruff
TORCH := torch==2.13.0
WORKERS := 2

PROBE := import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))
python_with = $(shell python3 -c '$(PROBE)' $(1) 2>/dev/null && echo python3 || echo $(VENV)/bin/python)
needs_venv = $(if $(filter $(VENV)/%,$(1)),venv)

RUN := $(or $(PYTHON),$(call python_with,$(RUNTIME)))
DEV := $(or $(PYTHON),$(call python_with,$(RUNTIME) $(TOOLS)))
DOCS := $(or $(PYTHON),$(call python_with,$(SITE)))

# Workers share what a test compiles where neighbouring tests, which share kernels, stay with one of them.
PYTEST_ON_WORKERS = $(DEV) -m pytest -n $(WORKERS) --dist worksteal
# Nearly all of tests/gpu is compiling; a machine without a GPU skips it.
ON_GPU = $(if $(shell command -v nvidia-smi),-n $(shell nproc) --dist worksteal --durations 20)
# What runs, before it does, and how long it took: $(call timed,name,command).
timed = @echo "== $(1)"; begin=$$(date +%s); $(2); status=$$?; \
	echo "== $(1): $$(( $$(date +%s) - begin )) s"; exit $$status

.PHONY: demo wheel release test test-all test-cpu test-sim test-sim-if-needed test-gpu test-engines plan-rows lint docs venv $(TORCHES:%=test-torch-%) \
	$(TRANSFORMERS:%=test-transformers-%)
# of docs/support.md
TORCHES := 2.9.1 2.15.0
# of docs/integrations.md
TRANSFORMERS := 5.17.0 5.24.0
OF_TRANSFORMERS := tests/cpu/integrations/test_transformers_*.py
# of contrib/README.md and docs/integrations_more.md
ENGINES := vllm==0.33.0 sglang==0.5.23 axolotl==0.19.0 diffusers==0.42.1 megatron-core==0.16.1 torchtitan==0.3.0
OF_TORCH := tests/cpu/autograd tests/cpu/flex tests/cpu/integrations/test_torch_*.py


# A demo needs no tools for development, and the software GPU needs numpy.
demo: $(if $(filter $(VENV)/%,$(RUN)),$(or $(wildcard $(STAMP)),$(VENV)/.runtime))
	$(RUN) examples/demo.py

# Each folder has a process of its own: the software GPU takes the place of CUDA in its process, and is of one
# architecture, so there are two of it.
# The GPU tests go first, so that the last words of a machine without a GPU are about tests that ran.
test: export FLASH_MASK_SIM_SEED := $(or $(FLASH_MASK_SIM_SEED),$(shell expr $$(date +%s) / 86400))
test: test-gpu test-sim-if-needed test-cpu

test-all: export FLASH_MASK_SIM_SEED := all
test-all: test-gpu test-sim test-cpu test-engines $(TORCHES:%=test-torch-%) $(TRANSFORMERS:%=test-transformers-%)
	FLASH_MASK_COMPILED_CALLS=all $(DEV) -m pytest tests/cpu/autograd/test_compiled_calls.py -n $(WORKERS)
	FLASH_MASK_PARALLEL_CALLS=all $(DEV) -m pytest tests/cpu/parallel/test_context_parallel.py

$(TORCHES:%=test-torch-%): test-torch-%: $(VENV)-torch-%/.installed
	$(VENV)-torch-$*/bin/python -m pytest $(OF_TORCH) -n $(WORKERS)

$(VENV)-torch-%/.installed: pyproject.toml
	python3 -m venv $(VENV)-torch-$*
	$(VENV)-torch-$*/bin/python -m pip install "torch==$*" -e ".[dev,cu13]"
	touch $@

$(TRANSFORMERS:%=test-transformers-%): test-transformers-%: $(VENV)-transformers-%/.installed
	$(VENV)-transformers-$*/bin/python -m pytest $(OF_TRANSFORMERS) -n $(WORKERS) --dist worksteal

$(VENV)-transformers-%/.installed: pyproject.toml
	python3 -m venv $(VENV)-transformers-$*
	$(VENV)-transformers-$*/bin/python -m pip install "$(TORCH)" "transformers==$*" -e ".[dev,cu13]"
	touch $@

# The Python files of the engines' own wheels, without what they depend on, in .engines. Each has a process of its own,
# because stand-ins for packages hold for a process.
test-engines: $(VENV)-engines/.installed
	set -e; for file in tests/engines/test_*.py contrib/tests/test_*.py; do \
		PYTHONPATH=.engines $(VENV)-engines/bin/python -m pytest $$file; done

$(VENV)-engines/.installed: pyproject.toml tests/engines/requirements.txt tests/engines/fetch.py
	python3 -m venv $(VENV)-engines
	$(VENV)-engines/bin/python -m pip install "$(TORCH)" -e ".[dev,cu13]" -r tests/engines/requirements.txt
	rm -rf .engines
	$(VENV)-engines/bin/python tests/engines/fetch.py .engines $(ENGINES)
	touch $@

test-cpu: $(call needs_venv,$(DEV))
	$(call timed,tests/cpu and contrib/tests: no GPU,$(PYTEST_ON_WORKERS) tests/cpu contrib/tests)

test-gpu: $(call needs_venv,$(DEV))
	$(call timed,tests/gpu: the GPU if there is one,$(DEV) -m pytest tests/gpu $(ON_GPU))

test-sim: $(call needs_venv,$(DEV))
	$(call timed,tests/sim: kernels for Hopper,FLASH_MASK_SIM_ARCH=sm_90a $(PYTEST_ON_WORKERS) tests/sim)
	$(call timed,tests/sim: kernels for Blackwell,FLASH_MASK_SIM_ARCH=sm_100a $(PYTEST_ON_WORKERS) tests/sim)
	$(call timed,software_gpu/tests,OMP_NUM_THREADS=1 $(PYTEST_ON_WORKERS) software_gpu/tests)

# 3 is NOT_NEEDED of the script, which needs no packages.
test-sim-if-needed:
	@$(or $(PYTHON),python3) tests/simulator_needed.py; case $$? in 0) $(MAKE) test-sim;; 3) ;; *) exit 1;; esac

plan-rows: $(call needs_venv,$(DEV))
	PYTHONPATH=.:$(subst $(eval) ,:,$(wildcard tests/support/*)) $(DEV) tests/plan_rows.py --write

lint: $(call needs_venv,$(DEV))
	$(DEV) -m ruff check .
	$(DEV) -m ruff format --check .
	$(DEV) -m mypy

docs: $(if $(filter $(VENV)/%,$(DOCS)),$(VENV)/.docs)
	$(DOCS) -m mkdocs build --strict --quiet

$(VENV)/.docs: $(STAMP)
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

# Another folder, so that the installed package is imported.
wheel:
	rm -rf dist $(VENV)-build $(VENV)-wheel
	$(or $(PYTHON),python3) -m venv $(VENV)-build
	$(VENV)-build/bin/python -m pip install --quiet build
	$(VENV)-build/bin/python -m build
	$(or $(PYTHON),python3) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet $(if $(WHEEL_TORCH),torch==$(WHEEL_TORCH)) dist/*.whl
	cd dist && ../$(VENV)-wheel/bin/python -m flash_mask_cute

release:
	$(or $(PYTHON),python3) .ci/release.py $(VERSION)

venv: $(STAMP)

# torch goes first, so that whichever build of it the machine's pip offers (CPU or CUDA) is there when the rest resolves
$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt "$(TORCH)"
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[dev,cu13,end-to-end]"
	touch $@

$(VENV)/.runtime: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt "$(TORCH)"
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[cu13]" numpy
	touch $@
