# make demo   run the examples (on the GPU if there is one)
# make test   CPU tests, the kernels on the software GPU, GPU tests where there is a Hopper GPU
# make test-all   also the tests that depend on the version of torch, with the oldest and the newest one of
#             docs/support.md, and the whole table of compiled calls (an hour, and 6 GB for each torch)
# make lint   ruff check, ruff format --check, mypy
#
# Which Python: PYTHON=... if given. Otherwise `python3`, if it already has every module that the target needs (so a
# GPU machine with its own torch is used as it is, and needs no network); otherwise .venv, which is made when missing.

VENV := .venv
STAMP := $(VENV)/.installed
RUNTIME := torch cutlass tvm_ffi
TOOLS := pytest xdist hypothesis numpy ruff mypy
TORCH := torch==2.13.0
WORKERS := 2

PROBE := import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))
python_with = $(shell python3 -c '$(PROBE)' $(1) 2>/dev/null && echo python3 || echo $(VENV)/bin/python)
needs_venv = $(if $(filter $(VENV)/%,$(1)),venv)

RUN := $(or $(PYTHON),$(call python_with,$(RUNTIME)))
DEV := $(or $(PYTHON),$(call python_with,$(RUNTIME) $(TOOLS)))

# of docs/support.md
TORCHES := 2.9.1 2.14.1
OF_TORCH := tests/cpu/autograd tests/cpu/flex

.PHONY: demo test test-all test-cpu test-sim test-gpu lint venv $(TORCHES:%=test-torch-%)

demo: $(call needs_venv,$(RUN))
	PYTHONPATH=. $(RUN) examples/01_causal.py
	PYTHONPATH=. $(RUN) examples/02_varlen.py
	PYTHONPATH=. $(RUN) examples/03_column_intervals.py
	PYTHONPATH=. $(RUN) examples/04_block_sparse.py
	PYTHONPATH=. $(RUN) examples/05_score_mod.py
	PYTHONPATH=. $(RUN) examples/06_mask_mod_prefix_lm.py
	PYTHONPATH=. $(RUN) examples/07_native_api.py
	PYTHONPATH=. $(RUN) examples/08_autograd.py
	PYTHONPATH=. $(RUN) examples/09_training.py
	PYTHONPATH=. $(RUN) examples/10_native_backward.py
	PYTHONPATH=. $(RUN) examples/11_decode.py
	PYTHONPATH=. $(RUN) examples/12_flex.py

# Each folder has a process of its own: the software GPU takes the place of CUDA in its process, and is of one
# architecture, so there are two of it.
# The GPU tests go first, so that the last words of a machine without a GPU are about tests that ran.
test: test-gpu test-sim test-cpu

test-all: test $(TORCHES:%=test-torch-%)
	FLASH_MASK_COMPILED_CALLS=all $(DEV) -m pytest tests/cpu/autograd/test_compiled_calls.py -n $(WORKERS)

$(TORCHES:%=test-torch-%): test-torch-%: $(VENV)-torch-%/.installed
	$(VENV)-torch-$*/bin/python -m pytest $(OF_TORCH) -n $(WORKERS)

$(VENV)-torch-%/.installed: pyproject.toml
	python3 -m venv $(VENV)-torch-$*
	$(VENV)-torch-$*/bin/python -m pip install "torch==$*" -e ".[dev,cu13]"
	touch $@

test-cpu: $(call needs_venv,$(DEV))
	$(DEV) -m pytest tests/cpu -n $(WORKERS)

test-gpu: $(call needs_venv,$(DEV))
	$(DEV) -m pytest tests/gpu

test-sim: $(call needs_venv,$(DEV))
	FLASH_MASK_SIM_ARCH=sm_90a $(DEV) -m pytest tests/sim -n $(WORKERS)
	FLASH_MASK_SIM_ARCH=sm_100a $(DEV) -m pytest tests/sim -n $(WORKERS)
	$(DEV) -m pytest tests/software_gpu -n $(WORKERS)

lint: $(call needs_venv,$(DEV))
	$(DEV) -m ruff check .
	$(DEV) -m ruff format --check .
	$(DEV) -m mypy

venv: $(STAMP)

# torch goes first, so that whichever build of it the machine's pip offers (CPU or CUDA) is there when the rest resolves
$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt "$(TORCH)"
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[dev,cu13]"
	touch $@
