#!/usr/bin/env bash
# A machine like the one that tools/gpu_check.sh is carried to, but without a GPU: Python 3.12, the
# packages of its image, the archives beside them; then every import of every part is tried, on a
# pretended CUDA device (tests/fake_cuda/imports.py):
#     bash tools/simulated_box.sh DIR ARCHIVES
# DIR receives the environment, 7 GB, most of it CUDA's libraries, and is used again by the next call.
# BOX_PYTHON names the interpreter (default python3.12), BOX_PACKAGES replaces the packages.
set -eu
if [ $# != 2 ] || [ ! -d "$2" ]; then
    echo "error: usage: bash tools/simulated_box.sh DIR ARCHIVES, the directory of *.tar.xz and *.whl" >&2
    exit 2
fi
mkdir -p "$1"
box="$(cd "$1" && pwd)" archives="$(cd "$2" && pwd)"
cd "$(dirname "$0")/.."
packages="torch==2.11.0 triton==3.6.0 numpy==2.5.2 numba==0.68.1 transformers==5.17.0
    tokenizers==0.23.2 hypothesis pytest pytest-xdist pytest-timeout rich psutil scipy matplotlib
    tensorboard einops onnxscript httpx pillow requests aiohttp uvloop prometheus-client tiktoken
    sentencepiece nvidia-ml-py msgpack cloudpickle pandas ninja torchvision==0.26.0 torchaudio==2.11.0
    peft accelerate timm xxhash joblib py-cpuinfo"
if [ ! -e "$box/.installed" ]; then
    "${BOX_PYTHON:-python3.12}" -m venv "$box/venv"
    "$box/venv/bin/python" -m pip install --quiet --no-compile ${BOX_PACKAGES:-$packages}
    : >"$box/.installed"
fi
export PYTHON="$box/venv/bin/python"
# the script itself unpacks, sets its variables and imports Transformer Engine; its part fails, as
# there is no GPU, and writes down the versions
bash tools/gpu_check.sh --archives "$archives" --site "$box/site" --output "$box/check" versions \
    >"$box/versions.txt" 2>&1 || true
grep -E "cannot unpack|does not load" "$box/versions.txt" || true
exec "$PYTHON" tests/fake_cuda/imports.py "$box/site"
