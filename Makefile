# make install   .venv with everything, the package built and installed in place
# make shims     the torch backend for each torch that the extra allows, for a wheel
# make demo      train a small network under DDP with Gloo and with pycollective, and kill ranks of
#                one (out/demo): under three minutes
# make test      every test but those of the site, which are make test-docs; the whole table under
#                mpiexec: make test-mpi; what takes long, as thousands of processes that end do: make
#                storm; 1,024 ranks: make scale
# make test-torch-suite  PyTorch's own tests of torch.distributed: docs/measured/torch_suite.md
# make wheel     a wheel of this Python and an sdist, in dist/; make test-wheel installs the wheel into
#                an environment without compiler, make or git, and tries it
# make test-pythons  the core's wheel on each of Python 3.10 to 3.14 that is here
# make examples  all programs of examples/, with the packages that some of them need
# make bench     the committed benchmarks (out of benchmarks/)
# make gpu       all that one GPU can show, with this python3 as it is: no network, no .venv
# make docs      the documentation site, in out/docs: begin at out/docs/index.html; make test-docs
#                tests it
# make lint      ruff, mypy, clang-format
# make sanitize  native tests, each under TSan or under ASan; with EVERY=1 all under both, with those of
#                GPUs and each instruction set's kernels
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Thousands of processes would each compile the package's Python anew: 13 to 18 % of their time.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := $(shell find csrc tests/cuda_driver benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' 2>/dev/null)
# What the build reads besides.
EMBEDDED := csrc/cuda/embed.py

.PHONY: install build shims demo test mpi-environments test-together test-alone test-mpi test-torch-suite wheel test-wheel test-pythons examples storm scale bench gpu docs test-docs lint format standin native-parts sanitize clean

install: $(VENV)/.built $(VENV)/.imported

$(VENV)/.requirements: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -r requirements-dev.txt
	touch $@

# Without --no-compile pip compiles all, of which a tenth is ever imported: 40 s. What tests import
# is compiled here, once; under make -j beside the build.
$(VENV)/.imported: $(VENV)/.requirements
	$(BIN)/python -c 'import torch._dynamo, hypothesis, matplotlib.pyplot, pytest, sklearn.datasets'
	touch $@

$(VENV)/.built: $(VENV)/.requirements setup.py pyproject.toml $(SOURCES) $(EMBEDDED)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	touch $@

build: install

# The torch shims of a wheel. SHIMS=--installed: only for the torch of .venv, which is built already.
SHIMS ?=
shims: install
	$(BIN)/python tools/shims.py $(SHIMS)

demo: install
	$(BIN)/python -m benchmarks.demo --out out/demo

# Where the MPIs cannot be had, the tests beside them are skipped, and say so. Most tests wait for
# processes much of their time, so two at a time; what another test could disturb runs after them,
# also if one of them has failed. In workers, for one that has to be ended takes no other test along.
USUAL := not whole_table and not storm and not wheel
WORKERS := --dist loadfile --no-loadscope-reorder
test: install mpi-environments
	$(MAKE) -j 1 --keep-going test-together test-alone

mpi-environments: install
	-$(BIN)/python -m benchmarks.mpi_environments
test-together: install
	$(BIN)/python -m pytest -n 2 $(WORKERS) -m '$(USUAL) and not alone' tests --ignore tests/docs
test-alone: install
	$(BIN)/python -m pytest -n 1 $(WORKERS) -m '$(USUAL) and alone' \
	  $$(grep -rl --include='test_*.py' mark.alone tests)

# The whole conformance table under MPICH and Open MPI: some minutes.
test-mpi: mpi-environments
	$(BIN)/python -m pytest -m '' tests/test_mpiexec.py tests/test_hosts.py \
	  tests/bootstrap/test_mpi.py

test-torch-suite: install
	$(BIN)/python -m tests.torch.pytorch_suite.report docs/measured/torch_suite.md

# What `make install` has compiled is packed as it is. All else that an earlier build left is removed,
# or a module that is gone would be packed too. Torch's libraries come with torch.
wheel: shims
	rm -rf dist build/dist build/lib.* pycollective.egg-info pycollective-[0-9]*
	PYCOLLECTIVE_TORCH=0 $(BIN)/python -m build -q --no-isolation --sdist --wheel -o build/dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w dist \
	  --exclude 'libtorch*' --exclude 'libc10*' build/dist/*.whl
	mv build/dist/*.tar.gz dist

test-wheel: wheel
	$(BIN)/python -m pytest -m wheel tests/test_packages.py

# Each Python of PYTHONS that is here builds the sdist without torch, installs it and tries it.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
test-pythons: install
	rm -rf build/pythons
	$(BIN)/python -m build -q --no-isolation --sdist -o build/pythons
	cd build/pythons && for python in $(PYTHONS); do \
	  if ! $$python -c "" 2>/dev/null; then echo "$$python is not here"; continue; fi; \
	  $$python -m venv $$python && PYCOLLECTIVE_TORCH=0 $$python/bin/pip install -q *.tar.gz && \
	  $$python/bin/pycollective verify -n 2 --quick && $$python/bin/pycollective doctor || exit 1; \
	done

# In an environment of their own, .venv-examples, with Accelerate, Lightning and transformers.
examples: install
	$(BIN)/python examples/run_all.py

# Many ranks as threads, on hosts that a fake network joins: every all-reduce algorithm. It takes
# some 7 GiB. Direct has fewer ranks: each keeps two parcels of 8 KiB for every other.
SCALE ?= 16x64
SCALE_DIRECT ?= 8x32
SCALED := ring tree halving_doubling recursive_doubling hierarchical
scale: install
	$(BIN)/python -m tests.schedule.native_plans $(SCALE) out/scale $(SCALED)
	$(BIN)/python -m tests.schedule.native_plans $(SCALE_DIRECT) out/scale direct
	$(MAKE) -j 2 -C csrc/tests ../../build/native/plain/test_internode_scale
	for algorithm in $(SCALED) direct; do \
	  build/native/plain/test_internode_scale out/scale/$$algorithm.programs || exit 1; done

# Processes that end in every way, 200 times each; the README's examples; what
# make gpu runs, on the stand-in for the driver; what else is too long for make test, and for CI's
# sanitizers.
storm: install
	$(BIN)/python -m pytest -m storm tests
	$(MAKE) sanitize EVERY=1

bench: install
	$(BIN)/python -m benchmarks.all --out benchmarks/results
	$(BIN)/python -m benchmarks.measured_tables
	$(BIN)/python -m benchmarks.front_page

# One bare machine with an H200: builds in place with PYTHON, under 8 minutes (benchmarks/gpu).
GPU_OUT ?= benchmarks/results
gpu:
	$(PYTHON) -m benchmarks.gpu.run --out $(GPU_OUT)

docs: install
	$(BIN)/python -m sphinx -q -j auto -E -b html -d out/doctrees -W --keep-going docs out/docs

test-docs: docs
	$(BIN)/python -m pytest tests/docs

lint: $(VENV)/.requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy docs/conf.py
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(VENV)/.requirements
	$(BIN)/ruff check --fix -q . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

# The stand-in for a GPU's driver, and what else of native code tests and benchmarks in Python call:
# a test that needs one of them makes it, where it is not there.
standin:
	$(MAKE) -C tests/cuda_driver
native-parts:
	$(MAKE) -C csrc/tests native-parts

# Under a make -j of several targets, among its jobs.
JOBS = $(if $(findstring jobserver,$(MAKEFLAGS)),,-j 2)
sanitize:
	$(MAKE) $(JOBS) -C tests/cuda_driver $(if $(EVERY),sanitize,check)
	$(MAKE) $(JOBS) -C csrc/tests sanitize

clean:
	rm -rf build dist out *.egg-info pycollective/*.so pycollective/torch/shims
