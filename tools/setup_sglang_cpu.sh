#!/usr/bin/env bash
# Make a virtual environment in which the real, unmodified SGLang serves on a CPU, to train and test with its engine:
#   bash tools/setup_sglang_cpu.sh [DIRECTORY]       (default .venv-sglang beside .venv; about 2 GB, some minutes)
# then RAGEN_SGLANG_PYTHON=DIRECTORY/bin/python bash tools/test.sh tests/integration/test_sglang_engine.py
set -e
. "$(dirname "$0")/setup_env.sh"
parts="$REPOSITORY/tools/sglang_cpu"
venv="${1:-$REPOSITORY/.venv-sglang}"
python="$venv/bin/python"

[ -x "$python" ] || "$(_base_python)" -m venv "$venv"
echo "setup: installing SGLang for the CPU into $venv" >&2
_pip_install "$python" "$(grep '^torch==' "$REPOSITORY/constraints.txt")"
_pip_install "$python" --requirement "$parts/requirements.txt" --constraint "$parts/constraints.txt"
_pip_install "$python" --no-deps --requirement "$parts/requirements-no-deps.txt"

# Stand-ins for the GPU libraries that SGLang imports when it starts; never over the real ones.
site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
cp "$parts/absent_on_cpu.py" "$site/"
for package in triton torchvision sgl_kernel; do
    if [ ! -e "$site/$package" ] || cmp -s "$parts/$package/__init__.py" "$site/$package/__init__.py" ||
        grep -q absent_on_cpu "$site/$package/__init__.py" 2>/dev/null; then
        mkdir -p "$site/$package"
        cp "$parts/$package/__init__.py" "$site/$package/"
    fi
done

SGLANG_USE_CPU_ENGINE=1 "$python" -c 'import sglang.launch_server, sglang; print("SGLang", sglang.__version__, "is ready")'
echo "RAGEN_SGLANG_PYTHON=$(cd "$venv/bin" && pwd)/python"
