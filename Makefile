# make demo      set everything up and run the main job (GSM8K GRPO with a live vLLM engine)
# make test      set everything up and pass the tests (minutes; `make test-slow` runs the rest)
PYTHON ?= python3
VENV ?= .venv
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | head -n 1)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

.PHONY: install demo verl-demo openrlhf-demo test test-slow test-frameworks test-frameworks-slow test-vllm024 test-gpu matrix check bench bench-frameworks clean
.DELETE_ON_ERROR:

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements/cpu.txt requirements/gpu.txt requirements/gpu-no-deps.txt requirements/install.sh
	PYTHON="$(PYTHON)" bash requirements/install.sh $(VENV) $(if $(GPU),gpu.txt,cpu.txt)
	touch $@

.venv-frameworks/.installed: pyproject.toml requirements/cpu-frameworks.txt requirements/install.sh
	PYTHON="$(PYTHON)" bash requirements/install.sh .venv-frameworks cpu-frameworks.txt
	touch $@

.venv-vllm024/.installed: pyproject.toml requirements/cpu-vllm024.txt requirements/install.sh
	PYTHON="$(PYTHON)" bash requirements/install.sh .venv-vllm024 cpu-vllm024.txt
	touch $@

demo: $(INSTALLED)
	$(BIN)/sparrowrl demo $(ARGS)

test: $(INSTALLED)
	$(BIN)/pytest -m "not slow and not gpu" $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels/test_triton_interpreter.py

test-slow: $(INSTALLED)
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

# verl on a CPU: two FSDP2 ranks and an engine, six synced steps of a tiny model.
verl-demo: .venv-frameworks/.installed
	.venv-frameworks/bin/python -m sparrowrl.examples.gsm8k_grpo.verl.cpu $(ARGS)

# OpenRLHF on a CPU: DeepSpeed and an engine, six synced steps of a tiny model.
openrlhf-demo: .venv-frameworks/.installed
	.venv-frameworks/bin/python -m sparrowrl.examples.gsm8k_grpo.openrlhf.cpu $(ARGS)

# The plugins, and what of the engine side depends on vLLM, with an older one that both frameworks work with (all models
# on it: `make matrix`); without a GPU only.
ELSEWHERE := $(patsubst %,--ignore=tests/vllm_worker_ext/test_%.py,matrix any_loader agreement)
test-frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/pytest tests/job tests/verl_plugin tests/openrlhf_plugin tests/vllm_worker_ext $(ELSEWHERE) \
		tests/examples/test_verl_example.py tests/examples/test_openrlhf_example.py -m "not slow and not gpu" $(ARGS)

test-frameworks-slow: .venv-frameworks/.installed
	.venv-frameworks/bin/pytest tests/verl_plugin tests/openrlhf_plugin -m "slow and not gpu" $(ARGS)

# Not part of CI, for its size: 6 GB, since it may have to take torch's CUDA build.
test-vllm024: .venv-vllm024/.installed
	.venv-vllm024/bin/pytest tests/vllm_worker_ext -m "not slow and not gpu" $(ARGS)

# An hour or two: every cell of docs/engines.md, which it writes anew.
matrix: $(INSTALLED) .venv-frameworks/.installed
	RECORD_ENGINES=1 $(BIN)/pytest tests/vllm_worker_ext/test_matrix.py $(ARGS)
	RECORD_ENGINES=1 .venv-frameworks/bin/pytest tests/vllm_worker_ext/test_matrix.py $(ARGS)
	$(BIN)/python tests/engine_records.py

test-gpu: $(INSTALLED)
	$(BIN)/pytest -m gpu $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/aot.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/transport.py
	$(BIN)/python benchmarks/apply.py

# The frameworks' syncs beside their own ways, six minutes each.
bench-frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/python benchmarks/verl.py
	.venv-frameworks/bin/python benchmarks/openrlhf.py

clean:
	rm -rf $(VENV) build dist *.egg-info runs
