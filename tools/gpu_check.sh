#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, each part on its own, with one report:
#     bash tools/gpu_check.sh [--output DIR] [--minutes N] [PART ...]
# Parts, in this order: versions kernels bench train parity engines. Without names all run; a part that fails or runs out
# of its share of the time (N minutes for all, default 9) does not stop the others. DIR (default gpu_check) receives
# report.md and <part>.log. The exit code is the number of parts that failed.
# On a machine without a package index, unpack what it lacks into one directory and name that in SITE.
set -u
cd "$(dirname "$0")/.."
output=gpu_check minutes=9 parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --output) output="$2"; shift 2 ;;
        --minutes) minutes="$2"; shift 2 ;;
        -h | --help) sed -n '2,7s/^# \?//p' "$0"; exit 0 ;;
        versions | kernels | bench | train | parity | engines) parts+=("$1"); shift ;;
        *) echo "error: unknown part or flag $1; see --help" >&2; exit 2 ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=(versions kernels bench train parity engines)
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
export PYTHONPATH="${SITE:+$SITE:}$PWD:$PWD/kernels" PYTHONUNBUFFERED=1 SGLANG_IS_FLASHINFER_AVAILABLE=0
mkdir -p "$output"
report="$output/report.md"

versions() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader || true
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

import torch  # before transformer_engine, whose libraries it loads

print("python", platform.python_version(), "cuda", torch.version.cuda, "devices", torch.cuda.device_count())
for name in ("torch", "triton", "megatron-core", "transformer-engine", "sglang", "flash-attn", "transformers", "numpy"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "missing")
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(index), "sm_%d%d" % torch.cuda.get_device_capability(index))
if not torch.cuda.is_available():
    raise SystemExit("no CUDA device: nothing below can pass")
PYTHON
}

kernels() { "$python" -m pytest tests/kernels -m "gpu or not gpu" -q -x --maxfail=20 -p no:cacheprovider; }

bench() { "$python" tools/bench_kernels.py --json "$output/bench_kernels.json" --plot "$output/bench_kernels.svg"; }

train() { # the whole loop on the GPU in float32 and bfloat16, from the small model's warm start to its export
    local flags=(--recipe bandit --num-steps 3 --eval-prompts 64 --output "$output/runs" --overwrite)
    local launch=("$python" tools/launch.py --nproc-per-node 1 examples/pretrain_starpo.sh)
    "${launch[@]}" "${flags[@]}" --name float32 && "${launch[@]}" "${flags[@]}" --name bf16 --bf16
}

parity() { "$python" tools/parity.py --json "$output/parity.json"; }

engines() { # that the libraries of the throughput path load and compute here
    "$python" - <<'PYTHON'
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

layer = te.Linear(256, 512, params_dtype=torch.bfloat16, device="cuda")
x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
truth = x.double() @ layer.weight.double().T + layer.bias.double()
for recipe in (None, DelayedScaling(), Float8CurrentScaling()):
    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        error = float((layer(x).double() - truth).norm() / truth.norm())
    print(type(recipe).__name__, "relative error", f"{error:.2e}")
    assert error < (0.01 if recipe is None else 0.1)
import sglang

print("sglang", sglang.__version__, "imports")
PYTHON
}

{ echo "# GPU check"; echo; echo "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"; echo
  echo "| part | result | seconds | last line |"; echo "|---|---|---|---|"; } >"$report"
export -f versions kernels bench train parity engines
export python output
failed=0 deadline=$((SECONDS + minutes * 60))
for part in "${parts[@]}"; do
    start=$SECONDS left=$((deadline - SECONDS)) code=0
    if [ "$left" -lt 10 ]; then
        code=skipped
    else
        timeout --kill-after=10 "$left" bash -c "$part" >"$output/$part.log" 2>&1 || code=$?
    fi
    case "$code" in 0) result=passed ;; 124 | 137) result="out of time" ;; skipped) result="no time left" ;; *) result="failed ($code)" ;; esac
    [ "$code" = 0 ] || failed=$((failed + 1))
    last="$(grep -v '^\s*$' "$output/$part.log" 2>/dev/null | tail -n 1 | tr '|' '/' | cut -c1-160)"
    echo "| $part | $result | $((SECONDS - start)) | $last |" | tee -a "$report"
done
if [ -f "$output/versions.log" ]; then { echo; echo '```'; cat "$output/versions.log"; echo '```'; } >>"$report"; fi
exit "$failed"
