# Two commands matter: `make demo` and `make test`. Both set up .venv on the first run.
#
#   make demo      a Hugging Face MoE model, stock against moe_ops, on this machine; QUANT=int4 (int8,
#                  fp8, mxfp4) adds one with quantised experts, BATCH=8 takes so many sequences
#   make test      a representative set of the tests, which is what CI runs
#   make test-all  every test that this machine can run
#   make check     format, lint, types, architecture and the fast tests among those of make test
#   make golden    accept the golden texts of tests as they are now
#   make gpu       the tests that need a CUDA GPU, and those of kernels, which run there compiled
#   make gpu-families  all other families at real widths on a CUDA GPU, JOBS checks side by side
#   make test-oldest   the Hugging Face tests on the oldest transformers we support
#   make peer-tests TRANSFORMERS=CHECKOUT  transformers' own tests of MoE models on our ops, from a checkout of the
#                  transformers that is installed; FAMILIES="mixtral gpt_oss" runs these alone
#   make export-tests  files of every runtime that we export to, in an environment with all of them
#   make families  which layers of which model family the passes find, with every torch we support
#   make docs      the site, into build/site; a warning or a dead link fails it
#   make bench     the op overhead and one layer, against transformers' own
#   make release   wheel and sdist of the last commit into dist, checked, installed and tried; nothing is uploaded
#
# TORCH names the torch to install where none (2.11 or newer) can be imported; PYTHON the interpreter to start from.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
OLDEST := transformers==5.17.0
JOBS ?= 1
TORCHES := torch==2.11.0 torch==2.13.0 torch==2.14.1

.PHONY: demo test test-all check golden gpu gpu-families test-oldest peer-tests export-tests families docs bench release clean

demo: $(VENV)/.ready-hf
	@$(RUN) examples/quickstart.py $(if $(QUANT),--quant $(QUANT)) $(if $(BATCH),--batch $(BATCH))

test: $(VENV)/.ready $(VENV)/wheels/.ready
	@$(RUN) -m pytest -n 2 --dist worksteal -m "not every"

test-all: $(VENV)/.ready $(VENV)/wheels/.ready
	@$(RUN) -m pytest -n 2 --dist worksteal

check: $(VENV)/.ready-dev
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/codespell $$(git ls-files)
	@$(RUN) -m pytest -q -n 2 -m "not slow and not gpu and not every"

golden: $(VENV)/.ready
	@EXPECTTEST_ACCEPT=1 $(RUN) -m pytest -q -m "not slow and not gpu" tests

gpu: $(VENV)/.ready
	@$(RUN) -m pytest -m gpu && $(RUN) -m pytest -m "not gpu" tests/kernels

# Goes on where it stopped, and writes what it has into docs/FAMILIES.md, whatever came of it.
gpu-families: $(VENV)/.ready
	@$(RUN) -m tests.hf.gpu_families --jobs $(JOBS); status=$$?; \
		$(RUN) -m tests.hf.gpu_families --write && exit $$status

docs: $(VENV)/.ready-docs
	@$(RUN) -m sphinx -W --keep-going -n -q -j auto -c docs/site -d build/doctrees . build/site
	@echo "[docs] build/site/index.html"

bench: $(VENV)/.ready
	@$(RUN) -m moe_ops.bench

test-oldest: $(VENV)-oldest/.ready
	@$(VENV)-oldest/bin/python -m pytest -n 2 --dist worksteal tests/hf

peer-tests: $(VENV)/.ready-peers
	@$(RUN) -m tests.peers $(or $(TRANSFORMERS),$(error give TRANSFORMERS=CHECKOUT, a checkout of transformers)) \
		$(if $(FAMILIES),--families $(FAMILIES))

export-tests: $(VENV)-export/.ready
	@$(VENV)-export/bin/python -m pytest -m export tests/exporting

families:
	@for torch in $(TORCHES); do \
		venv=$(VENV)-$$torch; \
		sh .ci/setup_venv.sh $$venv "$(PYTHON)" "$$torch" -e ".[test]" && \
		EXPECTTEST_ACCEPT=1 $$venv/bin/python -m pytest tests/passes/test_families.py \
			tests/generation/test_published_classes.py || exit 1; \
	done

release: $(VENV)/.ready $(VENV)-release/.ready
	@$(RUN) -m tests.release --tools $(VENV)-release/bin/python --python "$(PYTHON)" --torch "$(TORCH)"

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info

# An environment is ready once its stamp is newer than pyproject.toml. What tests need has all that the demo needs.
$(VENV)/.ready-hf: pyproject.toml .ci/setup_venv.sh
	@sh .ci/setup_venv.sh $(VENV) "$(PYTHON)" "$(TORCH)" -e ".[hf]"
	@touch $@

$(VENV)/.ready: pyproject.toml .ci/setup_venv.sh
	@sh .ci/setup_venv.sh $(VENV) "$(PYTHON)" "$(TORCH)" -e ".[test]"
	@touch $@ $(VENV)/.ready-hf

$(VENV)/.ready-dev: $(VENV)/.ready
	@sh .ci/setup_venv.sh $(VENV) "$(PYTHON)" "$(TORCH)" -e ".[test,dev]"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-hf
	@sh .ci/setup_venv.sh $(VENV) "$(PYTHON)" "$(TORCH)" -e ".[hf,docs]"
	@touch $@

$(VENV)-release/.ready:
	@"$(PYTHON)" -m venv $(VENV)-release
	@$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@touch $@

# What transformers' tests import besides.
$(VENV)/.ready-peers: $(VENV)/.ready
	@$(RUN) -m pip install --quiet --disable-pip-version-check httpx parameterized psutil
	@touch $@

# The newest FlashInfer and Humming: tests compare what their functions take with what is given. Nothing imports them.
$(VENV)/wheels/.ready: $(VENV)/.ready
	@lacks=; for package in flashinfer-python humming-kernels; do \
		echo "[setup] downloading $$package, to compare signatures"; \
		$(RUN) -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) $$package || lacks=1; \
	done; \
	[ -n "$$lacks" ] && echo "[setup] not all are to be had, so a test is skipped" || touch $@

# ExecuTorch names a torch of its own, which would take the place of ours, and what its kernels need.
$(VENV)-export/.ready: pyproject.toml .ci/setup_venv.sh
	@sh .ci/setup_venv.sh $(VENV)-export "$(PYTHON)" "$(TORCH)" -e ".[test,export]"
	@$(VENV)-export/bin/python -m pip install --quiet --disable-pip-version-check --no-deps executorch flatbuffers \
		ruamel.yaml tabulate torchao pytorch_tokenizers
	@touch $@

$(VENV)-oldest/.ready: pyproject.toml .ci/setup_venv.sh
	@sh .ci/setup_venv.sh $(VENV)-oldest "$(PYTHON)" "$(TORCH)" "$(OLDEST)" -e ".[test]"
	@touch $@
