#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, each part on its own, with one report:
#     bash tools/gpu_check.sh [--output DIR] [--minutes N] [--archives DIR] [PART ...]
# Parts, in this order: versions kernels bench te fp8 train parity engines. Without names all run; a part that fails, lacks
# a package or runs out of its share of the time (N minutes for all, default 9) does not stop the others. DIR (default
# gpu_check) receives report.md, report.json and <part>.log. The exit code is the number of parts that failed.
# On a machine without a package index give the packages it lacks in --archives: *.tar.xz are unpacked and *.whl installed
# into a temporary directory that is searched first. Or unpack them yourself and name that directory in SITE.
set -u
cd "$(dirname "$0")/.."
all=(versions kernels bench te fp8 train parity engines)
output=gpu_check minutes=9 archives= parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --output) output="$2"; shift 2 ;;
        --minutes) minutes="$2"; shift 2 ;;
        --archives) archives="$2"; shift 2 ;;
        -h | --help) sed -n '2,8s/^# \?//p' "$0"; exit 0 ;;
        *)
            if [[ " ${all[*]} " != *" $1 "* ]]; then echo "error: unknown part or flag $1; see --help" >&2; exit 2; fi
            parts+=("$1"); shift ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
if [ -n "$archives" ] && [ ! -d "$archives" ]; then
    echo "error: --archives $archives is no directory; name the one with the *.tar.xz and *.whl files" >&2; exit 2
fi
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
mkdir -p "$output"
if [ -n "$archives" ]; then # what cannot be unpacked is told and then missing from the parts that need it
    SITE="$(mktemp -d)"
    trap 'rm -rf "$SITE"' EXIT
    for file in "$archives"/*.tar.xz; do
        [ ! -e "$file" ] || tar xJf "$file" -C "$SITE" || echo "cannot unpack $file" >&2
    done
    for file in "$archives"/*.whl; do
        [ ! -e "$file" ] || "$python" -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "$file" ||
            echo "cannot install $file" >&2
    done
fi
export PYTHONPATH="${SITE:+$SITE:}$PWD:$PWD/kernels" PYTHONUNBUFFERED=1 SGLANG_IS_FLASHINFER_AVAILABLE=0
if [ -z "${CUDA_HOME:-}" ] && nvcc="$(command -v nvcc)"; then # for what is compiled at first use
    CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
    export CUDA_HOME
fi
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

require() { # one line instead of a traceback, and no tests that pass because they were skipped
    local module
    for module in "$@"; do
        "$python" -c "import torch, $module" && continue
        echo "$module cannot be imported here; see tools/doctor.py --for h100"
        return 1
    done
}

te() { # Transformer Engine's layers against the local ones with the same weights, FP8 recipes, checkpoints of both
    require transformer_engine.pytorch &&
        "$python" -m pytest tests/integration/test_transformer_engine.py -m gpu -q -rs -p no:cacheprovider
}

fp8() { # three steps of training with FP8, then drift and break-even shapes
    require transformer_engine.pytorch || return 1
    local failed=0
    "$python" tools/launch.py --nproc-per-node 1 examples/pretrain_starpo.sh --recipe bandit --num-steps 3 \
        --eval-prompts 64 --output "$output/runs" --overwrite --name fp8 --bf16 --fp8 hybrid || failed=1
    "$python" tools/fp8_report.py --json "$output/fp8.json" --markdown "$output/fp8.md" && return "$failed"
}

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
export -f require "${all[@]}"
export python output
rows="$output/.rows.tsv" failed=0 started="$(date +%s)"
: >"$rows"
deadline=$((SECONDS + minutes * 60))
for part in "${parts[@]}"; do
    start=$SECONDS left=$((deadline - SECONDS)) code=0
    if [ "$left" -lt 10 ]; then
        code=skipped
    else
        timeout --kill-after=10 "$left" bash -c "$part" >"$output/$part.log" 2>&1 || code=$?
    fi
    case "$code" in 0) result=passed ;; 124 | 137) result="out of time" ;; skipped) result="no time left" ;; *) result="failed ($code)" ;; esac
    [ "$code" = 0 ] || failed=$((failed + 1))
    last="$(grep -v '^\s*$' "$output/$part.log" 2>/dev/null | tail -n 1 | tr '|\t' '/ ' | cut -c1-160)"
    echo "| $part | $result | $((SECONDS - start)) | $last |" | tee -a "$report"
    printf '%s\t%s\t%s\t%s\n' "$part" "$result" "$((SECONDS - start))" "$last" >>"$rows"
done
if [ -f "$output/versions.log" ]; then { echo; echo '```'; cat "$output/versions.log"; echo '```'; } >>"$report"; fi
"$python" - "$output" "$started" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" <<'PYTHON'
import json
import sys
from pathlib import Path

output, started, commit = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rows = output / ".rows.tsv"
parts = [dict(zip(("part", "result", "seconds", "last_line"), line.split("\t"))) for line in rows.read_text().splitlines()]
rows.unlink()
log = output / "versions.log"
report = {
    "commit": commit,
    "versions": log.read_text().splitlines() if log.exists() else [],
    "parts": [part | {"seconds": int(part["seconds"])} for part in parts],
}
for path in sorted(output.glob("*.json")):  # what the parts measured, now and not in an earlier check
    if path.name != "report.json" and path.stat().st_mtime >= started:
        report[path.stem] = json.loads(path.read_text())
(output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
PYTHON
exit "$failed"
