#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, each part on its own, with one report:
#     bash tools/gpu_check.sh [--output DIR] [--pack FILE] [--minutes N] [--archives DIR] [--small]
#         [PART ...]
# Parts, in this order:
#     versions te fp8 reshard step kernels sglang bench sgl_train train parity engines
#     sglang: a real server against transformers, its sleep, its death; step: seconds per StarPO-S
#     step of a 0.5B model and where they go; reshard: a weight sync of 7B against the device's
#     copies; sgl_train: training with SGLang's rollouts. The first of them that uses SGLang finds
#     out with which settings it serves here: tools/sglang_probe.py.
# Without names all run. A part that fails, lacks a package or runs out of time does not stop the
# others: each has its share of the N minutes for all (default 9), and more if the parts after it
# can spare it; unpacking counts as well. The first five certainly fit in 9 minutes, all of them in 21.
# DIR (default gpu_check) receives report.md, report.json and <part>.log. The exit code is the number
# of parts that failed. After each part FILE (.tar.gz) holds all that is worth keeping of DIR, for a
# machine that gives few files back or may be taken away in the middle.
# SHARES replaces the seconds of single parts, e.g. SHARES="step=600 kernels=300".
# --small tries the script itself out: every part with the smallest shapes, whose numbers say nothing.
# On a machine without a package index give the packages it lacks in --archives: *.tar.xz are
# unpacked and *.whl installed into a temporary directory that is searched first. Or unpack them
# yourself and name that directory in SITE. A folder tvm_ffi_cache in it holds kernels that SGLang
# would otherwise compile at first use, ten seconds each.
# SGLANG_FLAGS are added to the servers' command lines, e.g. SGLANG_FLAGS=--disable-cuda-graph.
set -u
cd "$(dirname "$0")/.."
all=(versions te fp8 reshard step kernels sglang bench sgl_train train parity engines)
declare -A share=( # seconds
    [versions]=40 [te]=60 [fp8]=100 [reshard]=50 [step]=260 [kernels]=110
    [sglang]=220 [bench]=60 [sgl_train]=180 [train]=60 [parity]=70 [engines]=40
)
for one in ${SHARES:-}; do share[${one%%=*}]="${one#*=}"; done
output=gpu_check pack= minutes=9 archives= small= parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --output) output="$2"; shift 2 ;;
        --pack) pack="$2"; shift 2 ;;
        --minutes) minutes="$2"; shift 2 ;;
        --archives) archives="$2"; shift 2 ;;
        --small) small=yes; shift ;;
        -h | --help) sed -n '2,/^set -u/s/^# \?//p' "$0"; exit 0 ;;
        *)
            if [[ " ${all[*]} " != *" $1 "* ]]; then
                echo "error: unknown part or flag $1; see --help" >&2
                exit 2
            fi
            parts+=("$1"); shift ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=("${all[@]}")
if [ -n "$archives" ] && [ ! -d "$archives" ]; then
    echo "error: --archives $archives is no directory; name that of the *.tar.xz and *.whl files" >&2
    exit 2
fi
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
case "$python" in
    */*) python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")" ;;
    *) python="$(command -v "$python")" ;;
esac
mkdir -p "$output"
output="$(cd "$output" && pwd)"
[ -z "$pack" ] || pack="$(cd "$(dirname "$pack")" && pwd)/$(basename "$pack")"
rm -rf "$output/.sglang" # what worked then may have been another machine
if [ -n "$archives" ]; then # what cannot be unpacked is told and then missing from the parts that need it
    SITE="$(mktemp -d)"
    trap 'rm -rf "$SITE"' EXIT
    for file in "$archives"/*.tar.xz; do
        [ ! -e "$file" ] || tar xJf "$file" -C "$SITE" || echo "cannot unpack $file" >&2
    done
    for file in "$archives"/*.whl; do
        [ ! -e "$file" ] ||
            "$python" -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "$file" ||
            echo "cannot install $file" >&2
    done
fi
[ -z "${SITE:-}" ] || SITE="$(cd "$SITE" && pwd)"
export PYTHONPATH="${SITE:+$SITE:}$PWD:$PWD/kernels" PYTHONUNBUFFERED=1
export SGLANG_IS_FLASHINFER_AVAILABLE=0
[ ! -d "${SITE:-}/tvm_ffi_cache" ] ||
    export TVM_FFI_CACHE_DIR="${TVM_FFI_CACHE_DIR:-$SITE/tvm_ffi_cache}"
if [ -z "${CUDA_HOME:-}" ] && nvcc="$(command -v nvcc)"; then # for what is compiled at first use
    CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$nvcc")")")"
    export CUDA_HOME
fi
if [ -n "$archives" ] && [ -d "$SITE/transformer_engine" ] &&
    ! "$python" -c "import torch, transformer_engine.pytorch" >"$output/transformer_engine.log" 2>&1; then
    # megatron-core works without it, but not if its libraries fail to load
    echo "Transformer Engine does not load and is left out: $(tail -n 1 "$output/transformer_engine.log")" >&2
    rm -rf "$SITE"/transformer_engine*
fi
report="$output/report.md"

# pytest without the repository's own flags: its time limits are a plug-in that may not be there, and
# what limits a part here is its share.
tests() { "$python" -m pytest -o addopts= -rs -p no:cacheprovider "$@"; }

smaller() { # PART: the flags with which --small makes it small
    [ -n "$small" ] || return 0
    local shape="$output/small" tiny
    tiny="--hidden-size 64 --ffn-hidden-size 128 --num-layers 2 --num-groups 2 --group-size 4
        --minibatch-size 4 --warm-start-first-turn-steps 2 --warm-start-steps 2
        --warm-start-trajectories 8 --eval-prompts 2 --max-response-length 4
        --filter-strategy none --filter-value None" # all of its rewards may be equal
    mkdir -p "$shape"
    cat >"$shape/config.json" <<'JSON'
{"model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
 "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "tie_word_embeddings": true}
JSON
    case "$1" in
        te) echo -k same_weights ;;
        fp8) echo --model "$shape" --drift-tokens 256 --tokens 128 --hidden 128 --length 64 \
            --repetitions 1 --recipes tensorwise ;;
        reshard) echo --model Qwen2.5-0.5B --memory-gb 0.1 --bucket-mb 4 --repeats 1 ;;
        step) echo --model "$shape" --num-groups 2 --group-size 2 --response-length 4 --keep 1 \
            --steps 3 ;;
        kernels) echo -k test_objective ;;
        sglang) echo -k follow_transformers ;;
        bench) echo --small --repetitions 1 --input-sets 1 ;;
        train) echo $tiny ;;
        parity) echo --layouts one_microbatch ;;
    esac
}

versions() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader || true
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

import torch  # before transformer_engine, whose libraries it loads

devices = torch.cuda.device_count()
print("python", platform.python_version(), "cuda", torch.version.cuda, "devices", devices)
needed = "torch triton megatron-core transformers tokenizers numpy rich psutil safetensors".split()
needed += ["httpx2", "pytest"]
others = "pytest-timeout transformer-engine pydantic einops onnxscript sglang flash-attn".split()
missing = []
for name in (*needed, *others):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "missing")
        missing += [name] if name in needed else []
for index in range(devices):
    print(torch.cuda.get_device_name(index), "sm_%d%d" % torch.cuda.get_device_capability(index))
if not torch.cuda.is_available():
    raise SystemExit("no CUDA device: nothing below can pass")
if missing:
    raise SystemExit(
        f"nearly all parts need {', '.join(missing)}: put wheels of them, with what they need, into"
        " --archives"
    )
PYTHON
}

# Without the slow ones: NVIDIA's sanitizer takes minutes, and not every machine lets it see the device.
kernels() { tests tests/kernels -m "not slow" -q --maxfail=20 $(smaller kernels); }

bench() {
    "$python" tools/bench_kernels.py --json "$output/bench_kernels.json" \
        --plot "$output/bench_kernels.svg" $(smaller bench)
}

require() { # one line instead of a traceback, and no tests that pass because they were skipped
    local module
    for module in "$@"; do
        "$python" -c "import torch, $module" && continue
        echo "$module cannot be imported here; see tools/doctor.py --for h100"
        return 1
    done
}

require_gpu() {
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && return
    echo "no CUDA device: this part would measure something else"
    return 1
}

# Prints the Python of the servers; they have an environment of their own, with its own packages.
sglang_python() {
    local home="$output/.sglang" flags="${SGLANG_FLAGS:-}"
    mkdir -p "$home/lib"
    if ! "$python" -c "import soundfile" 2>/dev/null; then
        echo '"""Stand-in: the HTTP server imports it, for requests with audio alone."""' \
            >"$home/lib/soundfile.py"
        echo "soundfile is missing; the servers get a stand-in" >&2
    fi
    local folders # a function with a here-document as a condition does not survive `export -f`
    folders="$("$python" -c 'import sgl_kernel; print(*sgl_kernel.__path__)')"
    if [ -z "$(find $folders -name "flash_ops*" -print -quit)" ]; then
        flags="--attention-backend triton $flags"
        echo "sgl_kernel has no flash_ops, SGLang's default: servers get --attention-backend triton" >&2
    fi
    write_server "$home" "$flags"
    if [ ! -e "$home/works" ]; then # once for all parts; what fails or is cut short leaves an empty file
        "$python" tools/sglang_probe.py --python "$home/python" --directory "$home" \
            --json "$output/sglang_probe.json" >"$home/works"
    fi
    if [ ! -s "$home/works" ]; then
        echo "SGLang serves here with no settings: see sglang_probe.json and $home/probe_*/server.log" >&2
        return 1
    fi
    case "$(sed -n 2p "$home/works")" in
        without*) write_server "$home" "$flags" "$(sed -n '2s/without //p' "$home/works")" ;;
        *) write_server "$home" "$flags $(sed -n 2p "$home/works")" ;;
    esac
    echo "$home/python"
}

write_server() { # DIRECTORY FLAGS [FLAG to leave out]
    printf '#!/usr/bin/env bash\nexport PYTHONPATH=%q\n' "${SITE:+$SITE:}$1/lib" >"$1/python"
    printf 'for flag; do shift; [ "$flag" = %q ] || set -- "$@" "$flag"; done\nexec %q "$@" %s\n' \
        "${3:-}" "$python" "$2" >>"$1/python"
    chmod +x "$1/python"
}

# A real server against transformers: numbers, sleep, death, and models that went through Megatron's
# format.
sglang() {
    local servers
    require_gpu && require sglang sgl_kernel && servers="$(sglang_python)" || return 1
    RAGEN_SGLANG_PYTHON="$servers" tests -m "not slow" -v $(smaller sglang) \
        tests/integration/test_sglang_engine.py tests/integration/test_exports_in_sglang.py
}

step() { # seconds per StarPO-S step of a 0.5B model, and where they go
    local servers
    require_gpu && require sglang sgl_kernel && servers="$(sglang_python)" || return 1
    "$python" tools/bench_step.py --json "$output/step.json" --output "$output/step" \
        $(smaller step) --rollout-engine sglang -- --sglang-python "$servers" \
        --weight-transfer "$(sed -n 1p "$output/.sglang/works")"
}

reshard() { # which share of the device's copy bandwidth a weight sync of 7B reaches
    require_gpu &&
        "$python" tools/bench_reshard.py --model Qwen2.5-7B --tensor-model-parallel-size 1 \
            --json "$output/reshard.json" $(smaller reshard)
}

# Transformer Engine's layers against the local ones with the same weights, FP8 recipes, checkpoints
# of both, offloading.
te() {
    require transformer_engine.pytorch &&
        tests tests/integration/test_transformer_engine.py tests/integration/test_offload.py \
            -m gpu -q $(smaller te)
}

fp8() { # three steps of training with FP8, then drift and break-even shapes
    require transformer_engine.pytorch || return 1
    local failed=0
    train_bandit fp8 --bf16 --fp8 hybrid || failed=1
    "$python" tools/fp8_report.py --json "$output/fp8.json" --markdown "$output/fp8.md" \
        $(smaller fp8) && return "$failed"
}

train_bandit() { # NAME FLAG...: three steps of the bandit's recipe
    "$python" tools/launch.py --nproc-per-node 1 examples/pretrain_starpo.sh --recipe bandit \
        --num-steps 3 --eval-prompts 64 $(smaller train) --output "$output/runs" --overwrite \
        --name "$@"
}

# The whole loop on the GPU in float32 and bfloat16, from the small model's warm start to its export.
train() { train_bandit float32 && train_bandit bf16 --bf16; }

# The loop with SGLang's rollouts, whose log-probabilities must be the trainer's, with either weight
# transfer.
sgl_train() {
    local transfer servers failed=0
    require_gpu && require sglang sgl_kernel && servers="$(sglang_python)" || return 1
    for transfer in ipc file; do
        train_bandit "sglang_$transfer" --bf16 --rollout-engine sglang --sglang-python "$servers" \
            --weight-transfer "$transfer" &&
            mismatch "$output/runs/sglang_$transfer/metrics.jsonl" || failed=1
    done
    return "$failed"
}

mismatch() { # fails unless engine and trainer agree in all three steps
    "$python" - "$1" <<'PYTHON'
import sys

from ragen_mega.report.metrics import read_metrics

for row in (rows := read_metrics(sys.argv[1])):
    if "mismatch/logprob_mean_abs_diff" not in row:
        raise SystemExit(f"step {row['step']} trained on nothing: its rewards were all equal")
    mean, largest = (row[f"mismatch/logprob_{kind}_abs_diff"] for kind in ("mean", "max"))
    said = f"log-probabilities differ by {mean:.4f} in the mean, {largest:.4f} at most"
    print(f"{sys.argv[1]} step {row['step']}: {said}")
    if mean > 0.05:
        raise SystemExit("engine and trainer compute different log-probabilities")
if len(rows) != 3:
    raise SystemExit(f"three steps were asked for, and {len(rows)} are logged")
PYTHON
}

parity() { "$python" tools/parity.py --json "$output/parity.json" $(smaller parity); }

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

pack_results() { # reports, numbers, logs; no weights
    [ -n "$pack" ] || return 0
    (cd "$output" && find . -type f -size -4M -not -path "*/checkpoints/*" -not -path "./small/*" \
        \( -name "*.log" -o -name "*.json" -o -name "*.jsonl" -o -name "*.md" -o -name "*.svg" \) \
        -print0 | tar -czf "$pack.part" --null -T -) && mv "$pack.part" "$pack"
}

{ echo "# GPU check"; echo; echo "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"; echo
  echo "| part | result | seconds | last line |"; echo "|---|---|---|---|"; } >"$report"
export -f tests smaller require require_gpu sglang_python write_server train_bandit mismatch "${all[@]}"
export python output small SITE="${SITE:-}" SGLANG_FLAGS="${SGLANG_FLAGS:-}"
# a pipe that never ends: see supervisor.py
mkfifo "$output/.open" && exec 9<>"$output/.open" && rm "$output/.open"
supervisor=ragen_mega/engines/sglang/supervisor.py
rows="$output/.rows.tsv" failed=0 started="$(date +%s)"
: >"$rows"
deadline=$((minutes * 60)) behind=0 # SECONDS counts from the start of this script
for part in "${parts[@]}"; do behind=$((behind + share[$part])); done
for part in "${parts[@]}"; do
    start=$SECONDS left=$((deadline - SECONDS)) code=0
    behind=$((behind - share[$part]))
    limit=$((left - behind > share[$part] ? left - behind : share[$part]))
    if [ "$left" -lt 10 ]; then
        code=skipped
    else # nothing that a part started, ranks and servers with sessions of their own, outlives it
        timeout --kill-after=10 "$((limit < left ? limit : left))" \
            "$python" -I "$supervisor" "$output/.none" bash -c "$part" \
            <&9 >"$output/$part.log" 2>&1 || code=$?
    fi
    case "$code" in
        0) result=passed ;;
        124 | 137) result="out of time" ;;
        skipped) result="no time left" ;;
        *) result="failed ($code)" ;;
    esac
    [ "$code" = 0 ] || failed=$((failed + 1))
    last="$(grep -v '^\s*$' "$output/$part.log" 2>/dev/null | tail -n 1)"
    last="$(tr '|\t' '/ ' <<<"$last" | cut -c1-160)"
    echo "| $part | $result | $((SECONDS - start)) | $last |" | tee -a "$report"
    printf '%s\t%s\t%s\t%s\n' "$part" "$result" "$((SECONDS - start))" "$last" >>"$rows"
    pack_results
done
if [ -f "$output/versions.log" ]; then { echo; echo '```'; cat "$output/versions.log"; echo '```'; } >>"$report"; fi
"$python" - "$output" "$started" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" <<'PYTHON'
import json
import sys
from pathlib import Path

output, started, commit = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
rows = output / ".rows.tsv"
columns = ("part", "result", "seconds", "last_line")
parts = [dict(zip(columns, line.split("\t"))) for line in rows.read_text().splitlines()]
rows.unlink()
log = output / "versions.log"
report = {
    "commit": commit,
    "versions": log.read_text().splitlines() if log.exists() else [],
    "parts": [part | {"seconds": int(part["seconds"])} for part in parts],
}
for path in sorted(output.glob("*.json")):  # measured now and not in an earlier check
    if path.name != "report.json" and path.stat().st_mtime >= started:
        report[path.stem] = json.loads(path.read_text())
(output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
PYTHON
pack_results
exit "$failed"
