# Everything that is done here often; `make` lists it. GNU make 3.81 (that of macOS) is enough.
# Each step is a file that the next one needs, so a second run goes on from what is there.

PYTHON ?= python3
VENV ?= .venv
PEERS_VENV ?= .venv-peers
STORES_VENV ?= .venv-stores
TRITON_VENV ?= .venv-triton
DOCS_VENV ?= .venv-docs
PRETRAIN_FLAGS ?=
FINETUNE_FLAGS ?=
BYTES_FLAGS ?=
GPU_REPORT_FLAGS ?=
BENCH_FLAGS ?=
WORKERS ?= 3
PART ?= 1/1

DEMO = $(if $(findstring --config,$(PRETRAIN_FLAGS)),,--config configs/demo.toml)
RUN = $(VENV)/bin/python
READY = $(VENV)/.megatronish-requirements
PEERS_READY = $(PEERS_VENV)/.megatronish-requirements
STORES_READY = $(STORES_VENV)/.megatronish-requirements
TRITON_READY = $(TRITON_VENV)/.megatronish-requirements
DOCS_READY = $(DOCS_VENV)/.megatronish-requirements
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
TORCH = "$$(grep '^torch==' requirements.txt)"
BENCH_READY = $(patsubst benchmarks/environments/%.txt,.venv-bench/%/.megatronish-requirements,$(wildcard benchmarks/environments/*.txt))

# Where it is set, each of the hundreds of processes that tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

help: ## this list
	@echo 'make TARGET [PYTHON=python3.12] [VENV=.venv] [PRETRAIN_FLAGS="--train-iters 100 ..."]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/\1|\2/p' Makefile | awk -F '|' '{ printf "  %-12s %s\n", $$1, $$2 }'

pretrain: demo/python_text_document.idx ## the main job: from Python's own library to a trained GPT, on 8 local ranks (or all GPUs)
	$(RUN) pretrain_gpt.py $(DEMO) $$($(RUN) -m megatronish.launch.fit configs/demo.toml $(PRETRAIN_FLAGS)) $(PRETRAIN_FLAGS)

quick: demo/quick_text_document.idx ## a first look in under a minute: bytes, one process
	$(RUN) pretrain_gpt.py --config configs/quick.toml $(PRETRAIN_FLAGS)

finetune: demo/python_text_document.idx ## LoRA on questions and answers, on 4 local ranks: data, audit, answers before and after, exports
	$(RUN) examples/finetune.py $(FINETUNE_FLAGS)

bytes: demo/python.jsonl ## a model of bytes in one process, against deflate on functions that it has not seen; five minutes
	$(RUN) examples/byte_model.py $(if $(BYTES_FLAGS),-- $(BYTES_FLAGS))

nightly: ## from a clean checkout all that docs/TRAINED.md shows: demo, its twin with experts, bytes, LoRA; twenty minutes
	$(MAKE) --no-print-directory pretrain
	$(MAKE) --no-print-directory pretrain PRETRAIN_FLAGS="--config configs/demo-moe.toml"
	$(MAKE) --no-print-directory bytes
	$(MAKE) --no-print-directory finetune

test: $(READY) ## the test suite, a quarter to three quarters of an hour on two cores (WORKERS=8 on more)
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal

test-fast: $(READY) ## quick tests that start no process: no ranks, no launcher, no compiler; under a minute
	$(RUN) -m pytest --fast --numprocesses $(WORKERS) --dist worksteal

test-all: $(READY) ## the test suite with every feature in every layout: hours, so PART=3/20 takes a twentieth of it
	$(RUN) -m pytest --all-layouts --part $(PART) --numprocesses $(WORKERS) --dist worksteal

dry-runs: $(READY) ## dry runs of 8B to 1T in less than a minute each, and of every stage of 405B; two minutes
	$(RUN) -m pytest --all-layouts tests/dry_run/test_large_dry_runs.py

attack: $(READY) ## kills, malformed inputs, hangs, flipped bits, slow ranks and lost hosts, with a table; about half an hour
	PYTHONPATH=tests/attack $(RUN) tests/attack/all.py

test-peers: $(PEERS_READY) ## against the real megatron-core and transformers, in an environment of their own
	$(PEERS_VENV)/bin/python -m pytest tests/peers

test-stores: $(STORES_READY) ## checkpoints, inputs and training data against a server of S3, and Ray, in an environment of their own
	$(STORES_VENV)/bin/python -m pytest tests/checkpoint/test_object_storage.py tests/launch/test_ray_train.py \
	    tests/data/test_stores.py tests/data/test_streamed.py tests/data/test_preprocess_ray.py \
	    tests/data/test_datatrove.py tests/data/test_language.py

test-triton: $(TRITON_READY) ## kernels in Triton without a GPU: interpreted, and compiled for three of them
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest --numprocesses $(WORKERS) tests/kernels/test_triton_interpreted.py
	$(TRITON_VENV)/bin/python -m pytest --numprocesses $(WORKERS) tests/kernels/test_triton_builds.py

test-docs: $(READY) $(DOCS_READY) ## the site: built strictly, every link, and in Chromium at two widths; a minute
	DOCS_VENV=$(DOCS_VENV) $(RUN) -m pytest tests/docs/test_site.py

docs: $(DOCS_READY) ## the documentation as a site, build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

check: $(READY) ## format, lint, types, layering and the words of docs and code
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest --numprocesses $(WORKERS) tests/test_layering.py tests/docs/test_words.py tests/docs/test_docs.py

package: $(READY) ## build the sdist and the wheel, and try both in a fresh environment
	$(RUN) .ci/try_package.py

bench: $(READY) ## side by side with what you would use instead, each in an environment of its own (BENCH_FLAGS="--quick")
	-@$(MAKE) --no-print-directory --keep-going $(BENCH_READY)
	$(RUN) -m benchmarks.side_by_side $(BENCH_FLAGS)

kernels: $(READY) ## compile the CUDA kernels (needs nvcc, no GPU) and print their registers and spills
	$(RUN) -m megatronish.ops.build

gpu: $(READY) ## the tests that need a GPU, with the CUDA kernels where they can be built
	-$(RUN) setup.py --quiet build_ext --inplace
	$(RUN) -m pytest -m gpu -rs

gpu-report: ## on a GPU, one report of all: kernels, tests, GPT-2 to 8B against a plain loop and FSDP2; installs nothing
	$(if $(wildcard $(READY)),$(RUN),$(PYTHON)) benchmarks/gpu_report/report.py $(GPU_REPORT_FLAGS)

venv: $(READY) ## the environment alone

clean: ## remove environments, caches and demo/ (what runs left in runs/ stays)
	rm -rf .venv .venv-peers .venv-stores .venv-triton .venv-docs .venv-bench demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help pretrain quick finetune bytes nightly test test-fast test-all test-peers test-stores test-triton test-docs docs dry-runs attack check package bench kernels gpu gpu-report venv clean
.DELETE_ON_ERROR:

# The environments.

define check_python
	@command -v "$(PYTHON)" > /dev/null || { echo 'there is no $(PYTHON) here; name a Python 3.11 or newer: make PYTHON=...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit("$(PYTHON) is Python %d.%d, but megatronish needs 3.11 or newer; name one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
endef

$(READY): requirements.txt
	$(check_python)
	@echo 'installing the dependencies of requirements.txt into $(VENV) (a minute or more, once)'
	@"$(PYTHON)" -m venv "$(VENV)"
	@$(RUN) $(PIP_INSTALL) $(TORCH)
	@$(RUN) $(PIP_INSTALL) -r requirements.txt
	@$(RUN) $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(PEERS_READY): requirements-peers.txt
	$(check_python)
	@echo 'installing megatron-core and transformers into $(PEERS_VENV) (a minute or more, once)'
	@"$(PYTHON)" -m venv "$(PEERS_VENV)"
	@$(PEERS_VENV)/bin/python $(PIP_INSTALL) $(TORCH)
	@$(PEERS_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-peers.txt
	@touch $@

$(STORES_READY): requirements.txt requirements-stores.txt
	$(check_python)
	@echo 'installing a server of S3 and Ray into $(STORES_VENV) (a minute or more, once)'
	@"$(PYTHON)" -m venv "$(STORES_VENV)"
	@$(STORES_VENV)/bin/python $(PIP_INSTALL) $(TORCH)
	@$(STORES_VENV)/bin/python $(PIP_INSTALL) -r requirements.txt -r requirements-stores.txt
	@$(STORES_VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(TRITON_READY): requirements.txt requirements-triton.txt
	$(check_python)
	@echo 'installing Triton into $(TRITON_VENV) (a minute or more, once)'
	@"$(PYTHON)" -m venv "$(TRITON_VENV)"
	@$(TRITON_VENV)/bin/python $(PIP_INSTALL) $(TORCH)
	@$(TRITON_VENV)/bin/python $(PIP_INSTALL) -r requirements.txt
	@$(TRITON_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-triton.txt
	@$(TRITON_VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(DOCS_READY): requirements-docs.txt
	$(check_python)
	@echo 'installing MkDocs into $(DOCS_VENV) (half a minute, once)'
	@"$(PYTHON)" -m venv "$(DOCS_VENV)"
	@$(DOCS_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements-docs.txt
	@touch $@

# What megatronish is measured against: one that does not install is told, and then reported in the table.
# Packages that are built here find torch and setuptools in their environment, not in a copy made for the build.
.venv-bench/%/.megatronish-requirements: benchmarks/environments/%.txt
	$(check_python)
	@echo 'installing benchmarks/environments/$*.txt into .venv-bench/$* (a minute or more, once)'
	@"$(PYTHON)" -m venv .venv-bench/$*
	@.venv-bench/$*/bin/python $(PIP_INSTALL) $(TORCH) "$$(grep '^setuptools==' requirements.txt)"
	@DS_BUILD_OPS=0 .venv-bench/$*/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -r $<
	@touch $@

# The demo's data. A changed environment is no reason to make them anew, hence the bars.

demo/python.jsonl: | $(READY)
	$(RUN) tools/collect_corpus.py --output $@

demo/tokenizer.model: demo/python.jsonl | $(READY)
	$(RUN) tools/train_tokenizer.py --input $< --output $@

demo/python_text_document.idx: demo/python.jsonl demo/tokenizer.model | $(READY)
	$(RUN) tools/preprocess_data.py --input $< --output-prefix demo/python \
		--tokenizer-type sentencepiece --tokenizer-model demo/tokenizer.model --append-eod --workers 2

demo/quick.jsonl: | $(READY)
	$(RUN) tools/collect_corpus.py --output $@ --max-bytes 3000000

demo/quick_text_document.idx: demo/quick.jsonl | $(READY)
	$(RUN) tools/preprocess_data.py --input $< --output-prefix demo/quick --tokenizer-type bytes --append-eod
