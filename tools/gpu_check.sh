#!/usr/bin/env bash
# Every check and benchmark that needs a GPU, each part on its own, with one report:
#     bash tools/gpu_check.sh [--output DIR] [--pack FILE] [--minutes N] [--archives DIR] [--site DIR]
#         [--weights DIR] [--again] [--small] [PART ...]
# Parts, in the order of their worth:
#     versions step step_fp8 update learn repeat kernels te train endure bench reshard moe lora
#     learn_seeds step_all bench_all fp8 parity sglang apart
#     kernels, te and train run together, all others alone. step: seconds per StarPO-S step of a 0.5B
#     model with SGLang and where they go, step_fp8 in FP8, step_all with all trajectories kept;
#     update: seconds, MFU and memory of the trainer alone, in another project's published setting
#     first, and with 32,768 tokens of context, alone and as a forest of four trajectories; learn:
#     SmolLM2-135M learns two tasks with SGLang, learn_seeds in two more seeds; repeat: whether a run
#     with deterministic servers repeats to the bit, and its cost; endure: 200 steps, a killed server,
#     a killed trainer, memory and handles; train: the whole recipe bandit; reshard: a weight sync of
#     7B against the device's copies; moe: a layer of experts as wide as Qwen3-30B-A3B's against its
#     products, the sync of a quarter of its layers, steps of a small mixture; lora: steps of a 7B
#     with adapters of actor and critic, its memory beside the plan, and full steps of a 1.5B; sglang:
#     a real server against transformers, its sleep, its death; apart: a rank that trains and one that
#     samples on one card, whose weights pass gloo, since NCCL joins no ranks that share one. The
#     first of them that uses SGLang finds out with which settings it serves here:
#     tools/sglang_probe.py.
# Without names all run. tools/gpu_schedule.py has their limits: a part starts if half its limit is
# left of the N minutes (default 7, unpacking included), and stops no other when it fails, lacks a
# package or runs out of time. SHARES replaces limits, e.g. SHARES="step=600 kernels=300". Without a
# GPU only `versions` runs.
# DIR (default gpu_check) receives report.md, report.json and <part>.log. The page report.md has at
# most 80 lines and is printed at the end: the figures of docs/benchmarks/gpu_day_predictions.json as
# predicted and as measured, then the parts. The exit code is the number of parts that did not pass.
# After each part FILE (.tar.gz) holds all that is worth keeping of DIR, for a machine that gives few
# files back or may be taken away.
# --again keeps the figures of an earlier call in DIR. Without names it runs what has not passed
# according to DIR/report.json, first what failed; what failed goes with more cautious settings.
# --small tries the script itself out: every part with the smallest shapes, whose numbers say nothing.
# On a machine without a package index give the packages it lacks in --archives: *.tar.xz and *.whl
# are unpacked into a directory that is searched first, that of --site, which stays and is not
# unpacked again, or a temporary one. Or unpack them yourself and name that directory in SITE. A
# folder tvm_ffi_cache in it holds kernels that SGLang would otherwise compile at first use.
# --weights (default models/smollm2) holds SmolLM2's model, or its GGUF file in one piece or in
# several, smollm2.gguf*, in folders of their own if each has to be carried apart.
# SGLANG_FLAGS are added to the servers' command lines, e.g. SGLANG_FLAGS=--disable-cuda-graph.
# SGLANG_WORKS=ipc (or file) leaves the search for working settings out: weights go that way.
# COMMIT names the commit where there is no .git; otherwise it is read from the file COMMIT of the
# repository, of the archives or of the site.
set -u
started="$(date +%s)"
cd "$(dirname "$0")/.."
all=(versions step step_fp8 update learn repeat kernels te train endure bench reshard moe lora
    learn_seeds step_all bench_all fp8 parity sglang apart)
output=gpu_check pack= minutes=7 archives= site= weights=models/smollm2 again= small= parts=()
while [ $# -gt 0 ]; do
    case "$1" in
        --output) output="$2"; shift 2 ;;
        --pack) pack="$2"; shift 2 ;;
        --minutes) minutes="$2"; shift 2 ;;
        --archives) archives="$2"; shift 2 ;;
        --site) site="$2"; shift 2 ;;
        --weights) weights="$2"; shift 2 ;;
        --again) again=again; shift ;;
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
[ -n "$again" ] && [ -s "$output/.sglang/works" ] || # what worked may have been another machine
    rm -rf "$output/.sglang"
weights="$(realpath -m "$weights")"
unpack() { # FILE: a packed site folder or a wheel; not every image has xz
    "$python" -I - "$1" "$SITE" <<'PYTHON' 2>/dev/null || echo "cannot unpack $1" >&2
import sys
import tarfile
import zipfile

packed, site = sys.argv[1:]
if packed.endswith(".whl"):
    zipfile.ZipFile(packed).extractall(site)
else:
    with tarfile.open(packed) as archive:
        archive.extractall(site, filter="data")
PYTHON
}
if [ -n "$archives" ]; then # what cannot be unpacked is told and missing from the parts that need it
    SITE="$site"
    if [ -z "$site" ]; then
        SITE="$(mktemp -d)"
        trap 'rm -rf "$SITE"' EXIT
    fi
    mkdir -p "$SITE"
    if [ ! -e "$SITE/.unpacked" ]; then
        for file in "$archives"/*.tar.xz "$archives"/*.whl; do
            [[ ! -e "$file" || "$file" == */sgl_fix* ]] || unpack "$file" &
        done
        wait
        [ ! -e "$archives/sgl_fix.tar.xz" ] || unpack "$archives/sgl_fix.tar.xz" # over sgl_site
        cp "$archives/COMMIT" "$SITE" 2>/dev/null
        : >"$SITE/.unpacked"
    fi
elif [ -n "$site" ]; then
    SITE="$site"
    mkdir -p "$SITE"
fi
if [ -z "${COMMIT:-}" ]; then
    COMMIT="$(git rev-parse HEAD 2>/dev/null || cat COMMIT "${archives:-.}/COMMIT" "${SITE:-.}/COMMIT" 2>/dev/null)"
    COMMIT="${COMMIT%%$'\n'*}"
fi
[ -z "${SITE:-}" ] || SITE="$(cd "$SITE" && pwd)"
export PYTHONPATH="${SITE:+$SITE:}$PWD:$PWD/kernels" PYTHONUNBUFFERED=1
export SGLANG_IS_FLASHINFER_AVAILABLE=0 COMMIT="${COMMIT:-unknown}"
export NVTE_FRAMEWORK=pytorch XLA_PYTHON_CLIENT_PREALLOCATE=false
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}" # one node; a sandbox may have no other link
# Transformer Engine prefers the cuDNN of CUDA_HOME to the one that torch was installed with, and two
# versions in one process fail at the first attention
cudnn="$("$python" -c 'import nvidia.cudnn as c; print(list(c.__path__)[0] + "/lib")' 2>/dev/null)"
[ -z "$cudnn" ] || export CUDNN_HOME="${CUDNN_HOME:-${cudnn%/lib}}" \
    LD_LIBRARY_PATH="$cudnn${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ -n "$archives$site" ] && [ -z "${SGLANG_FLAGS:-}" ]; then # a start in 40 seconds instead of 120
    SGLANG_FLAGS="--disable-prefill-cuda-graph --cuda-graph-max-bs-decode 128"
fi
if [ -n "$site" ]; then # what one call compiles, the next finds
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$SITE/cache/triton}"
    export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$SITE/cache/inductor}"
fi
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
    mkdir -p "$SITE/.left_out"
    mv "$SITE"/transformer_engine* "$SITE/.left_out/"
fi

# pytest without the repository's own flags: its time limits are a plug-in that may not be there, and
# what limits a part here is its share.
tests() { # FILE-OR-FLAG...; a part that is out of time leaves its junit file or the lines of -v
    "$python" -m pytest -o addopts= -rs -v -p no:cacheprovider "$@"
}

workers() { # N: tests of which nothing is timed share the cores, if the plug-in is there
    [ -n "$small" ] || ! "$python" -c "import xdist" 2>/dev/null || echo "-n $1"
}

again() { [[ " $AGAIN " == *" $1 "* ]]; } # PART: whether it failed in the call before

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
        fp8) echo --model "$shape" --tokens 256 --length 64 --recipes tensorwise ;;
        update) echo --model "$shape" --length 64 --repetitions 1 $([ "$2" = 1 ] || echo --prompt 48) ;;
        experts) echo --model "$output/mixture" --tokens 64 --repetitions 1 ;;
        moe_sync) echo --model "$output/mixture" --repeats 1 ;;
        reshard) echo --model Qwen2.5-0.5B --num-layers 1 --bucket-mb 4 --repeats 1 ;;
        step) echo --model "$shape" --num-groups 2 --group-size 2 --response-length 4 --steps 3 ;;
        kernels) echo -k test_objective ;;
        sglang) echo -k follow_transformers ;;
        bench*) echo --small --repetitions 1 --input-sets 1 ;;
        train) echo $tiny --num-steps 3 ;;
        endure) echo --endure 9 ;;
        parity) echo --layouts one_microbatch ;;
    esac
}

versions() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader || true
    nvcc --version | tail -n 1 || true
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

import torch  # before transformer_engine, whose libraries it loads

devices = torch.cuda.device_count()
print("python", platform.python_version(), "cuda", torch.version.cuda, "devices", devices)
needed = "torch triton megatron-core transformers tokenizers numpy numba rich psutil".split()
needed += ["safetensors", "httpx2", "pytest"]
others = "pytest-timeout transformer-engine pydantic einops onnxscript sglang flash-attn".split()
missing = []
for name in (*needed, *others):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "missing")
        missing += [name] if name in needed else []
try:
    import numba  # each version refuses newer ones of numpy
except ImportError as error:
    print("numba does not load, so only --rollout-engine sglang samples:", error)
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
# Work of the host says nothing about the device: those tests are left out.
kernels() {
    tests tests/kernels -m "not slow" --maxfail=20 $(workers 8) \
        --ignore=tests/kernels/test_compile.py --ignore=tests/kernels/test_interpreter_shim.py \
        --ignore=tests/kernels/test_tensor_parallel.py \
        --junitxml="$output/kernels.xml" $(smaller kernels)
}

bench_cases() { # NAME FLAG...
    "$python" tools/benchmarks/bench_kernels.py --json "$output/$1.json" --budget 60 \
        "${@:2}" $(smaller bench)
}
bench() { bench_cases bench_kernels --no-compile; } # ceilings first, then a shape of each job
bench_all() { bench_cases bench_compiled --no-peers; } # beside torch.compile

require() { # one line instead of a traceback, and no tests that pass because they were skipped
    local module
    for module in "$@"; do
        "$python" -c "import torch, $module" && continue
        echo "$module cannot be imported here; see ragen-mega doctor --for h100"
        return 1
    done
}

# Prints the Python of the servers; they have an environment of their own, with its own packages.
sglang_python() {
    local home="$output/.sglang" flags="${SGLANG_FLAGS:-}"
    [ ! -s "$home/works" ] || { echo "$home/python"; return; } # an earlier part has found out
    require sglang sgl_kernel >&2 || return 1
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
    [ -z "${SGLANG_WORKS:-}" ] || printf '%s\n\n' "$SGLANG_WORKS" >"$home/works"
    if [ ! -e "$home/works" ]; then # what fails or is cut short leaves an empty file for all parts
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
    servers="$(sglang_python)" || return 1
    RAGEN_SGLANG_PYTHON="$servers" tests -m "not slow" -v $(smaller sglang) \
        tests/integration/test_sglang_engine.py tests/integration/test_exports_in_sglang.py
}

# Seconds per StarPO-S step, and where they go; `workload` may hold flags of the benchmark.
starpo_steps() { # NAME SHARE MODEL [FLAG...]
    local servers cautious=
    servers="$(sglang_python)" || return 1
    ! again "$1" || cautious="--shared-prefixes off --transformer-impl local"
    "$python" tools/benchmarks/bench_step.py --json "$output/$1.json" --output "$output/$1" --keep "$2" \
        --model "$3" ${workload:-} $(smaller step) --rollout-engine sglang -- --sglang-python "$servers" \
        --weight-transfer "$(sed -n 1p "$output/.sglang/works")" $cautious "${@:4}"
}
step() { starpo_steps step 0.25 Qwen2.5-0.5B; }
step_fp8() {
    starpo_steps step_fp8 0.25 Qwen2.5-0.5B --fp8 hybrid --transformer-impl transformer_engine
}
step_all() { starpo_steps step_all 1 Qwen2.5-0.5B; } # all trajectories are kept

# Optimizer steps of the trainer alone, on trajectories whose first PROMPT tokens are one prompt's.
timed_update() { # NAME MODEL LENGTH TRAJECTORIES PROMPT [FLAG...]
    "$python" tools/benchmarks/bench_update.py --json "$output/update_$1.json" --model "$2" \
        --length "$3" --trajectories "$4" --prompt "$5" $(smaller update "$5") -- \
        --advantage-estimator grpo "${@:6}"
}

update() { # prime-rl's published setting, as it is and as one would run it here; 32k; FP8
    require transformer_engine.pytorch || return 1
    local failed=0
    timed_update peer Qwen3-0.6B 16384 2 1 --recompute full || failed=1
    timed_update peer_free Qwen3-0.6B 16384 2 1 --recompute none || failed=1
    timed_update long Qwen3-0.6B 32768 1 1 --recompute full || failed=1
    timed_update forest Qwen3-0.6B 32768 4 24576 --recompute full || failed=1
    timed_update wide Qwen2.5-3B 16384 1 1 --recompute full || failed=1
    timed_update wide_fp8 Qwen2.5-3B 16384 1 1 --recompute full --fp8 hybrid && return "$failed"
}

reshard() { # which share of the device's copy bandwidth a weight sync of 7B reaches
    "$python" tools/benchmarks/bench_reshard.py --model Qwen2.5-7B --tensor-model-parallel-size 1 \
        --json "$output/reshard.json" $(smaller reshard)
}

moe() { # a mixture of experts: products, sync, and a StarPO-S step with the embedded engine
    require transformer_engine.pytorch || return 1
    local failed=0 mixture="$output/mixture"
    mkdir -p "$mixture"
    cat >"$mixture/config.json" <<'JSON'
{"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 64,
 "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true, "num_attention_heads": 4,
 "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "tie_word_embeddings": false}
JSON
    "$python" tools/benchmarks/bench_mixture.py --json "$output/moe.json" $(smaller experts) || failed=1
    "$python" tools/benchmarks/bench_reshard.py --model Qwen3-30B-A3B --num-layers 12 \
        --tensor-model-parallel-size 1 --repeats 3 --json "$output/moe_sync.json" $(smaller moe_sync) ||
        failed=1
    "$python" tools/benchmarks/bench_step.py --model "$mixture" --rollout-engine embedded --keep 1 \
        --num-groups 2 --group-size 2 --response-length 4 --steps 3 --json "$output/moe_step.json" \
        --output "$output/moe_step" && return "$failed"
}

# A 7B with adapters of actor and critic, and all weights of a 1.5B: memory beside the plan, and
# seconds. Half of the trajectories and fewer steps, since weights of 15 GB are written and read.
lora() {
    local workload="--steps 4 --num-groups 4" failed=0
    starpo_steps lora 0.25 Qwen2.5-7B --lora-rank 32 --max-tokens-per-microbatch 4096 || failed=1
    starpo_steps lora_full 0.25 Qwen2.5-1.5B && return "$failed"
}

# Transformer Engine's layers against the local ones with the same weights, FP8 recipes, checkpoints
# of both, offloading.
te() {
    require transformer_engine.pytorch &&
        tests tests/integration/test_transformer_engine.py tests/integration/test_offload.py \
            -m gpu $(workers 4) --junitxml="$output/te.xml" $(smaller te)
}

fp8() { # the drift of log-probabilities
    require transformer_engine.pytorch &&
        "$python" tools/benchmarks/fp8_report.py --json "$output/fp8.json" $(smaller fp8)
}

training() { # NAME FLAG...: a run on one rank, or on `ranks`
    "$python" -m ragen_mega.commands.launch --nproc-per-node "${ranks:-1}" examples/pretrain_starpo.sh \
        "${@:2}" --save-interval 0 --output "$output/runs" --overwrite --name "$1"
}

# What runs have learned, and how far engine and trainer were apart.
learned() { # NAME [FLAG...] RUN...
    "$python" tools/learned.py --json "$output/$1.json" $([ -z "$small" ] || echo --goal 0) "${@:2}"
}

# The whole recipe on the GPU in bfloat16, from the small model's warm start to its export.
train() {
    local precision=--bf16
    ! again train || precision= # float32
    training train --recipe bandit --num-steps 20 --eval-prompts 64 $precision $(smaller train) &&
        learned train "$output/runs/train"
}

# One task of SmolLM2-135M-Instruct, whose weights are real; SGLang samples.
pretrained() { # NAME TASK FLAG...
    local model=(--recipe "smollm2_$2" --load "$weights") servers
    [ -z "$small" ] || model=(--recipe bandit $(smaller train))
    servers="$(sglang_python)" || return 1
    training "$1" "${model[@]}" --bf16 --rollout-engine sglang --sglang-python "$servers" \
        --weight-transfer "$(sed -n 1p "$output/.sglang/works")" "${@:3}"
}

find_weights() { # sets `weights` to a directory or a file that --load takes
    local parts=() joined="$output/.weights/smollm2.gguf"
    [ ! -e "$weights/config.json" ] && [ -z "$small" ] || return 0
    mapfile -t parts < <(find -L "$weights" -name 'smollm2.gguf*' 2>/dev/null | sort)
    if [ ${#parts[@]} = 0 ]; then
        echo "there are no weights of SmolLM2 in $weights: ragen-mega fetch smollm2, or --weights"
        return 77 # nothing to measure with
    fi
    mkdir -p "$output/.weights"
    [ -e "$joined" ] || cat "${parts[@]}" >"$joined"
    weights="$joined"
}

seeds() { # SEED...: both tasks in each; what is done is reported after every run
    find_weights || return
    local failed=0 seed task runs=()
    for seed in "$@"; do
        for task in lookup reverse; do
            pretrained "${task}_$seed" "$task" --seed "$seed" || failed=1
            runs+=("$output/runs/${task}_$seed")
            learned "learn_from_$1" "${runs[@]}" || failed=1
        done
    done
    return "$failed"
}
learn() { seeds 0; }
learn_seeds() { seeds 1 2; }

repeat() { # a run twice with servers whose samples depend on seeds alone; `learn` has it without
    find_weights || return
    local failed=0 name runs=()
    [ ! -e "$output/runs/reverse_0" ] || runs=("$output/runs/reverse_0")
    for name in once twice; do
        pretrained "repeat_$name" reverse --num-steps 6 --eval-prompts 2 --eval-samples 1 \
            --rollout-deterministic || failed=1
    done
    learned repeat --goal 0 --repeats "${runs[@]}" "$output"/runs/repeat_{once,twice} && return "$failed"
}

endure() {
    local servers
    servers="$(sglang_python)" || return 1
    "$python" tools/chaos.py --json "$output/endure.json" --work "$output/runs" --endure 200 \
        --sglang-python "$servers" $(smaller endure)
}

# Weights are fetched beside training. They hardly change, so a large mismatch means that others came.
apart() {
    local servers ranks=2
    servers="$(sglang_python)" || return 1
    training apart --recipe bandit --num-steps 8 --eval-prompts 16 --lr 1e-6 --bf16 \
        --rollout-engine sglang --sglang-python "$servers" --weight-transfer \
        "$(sed -n 1p "$output/.sglang/works")" --placement separate --rollout-ranks 1 \
        --max-staleness 1 --importance-cap 2 $(smaller train) &&
        learned apart --goal 0 "$output/runs/apart"
}

parity() { "$python" tools/parity.py --json "$output/parity.json" $(smaller parity); }

HAS_GPU="$("$python" -c 'import torch; print("yes" if torch.cuda.is_available() else "")')"
export -f tests workers again smaller starpo_steps timed_update bench_cases require sglang_python \
    write_server training learned pretrained find_weights seeds "${all[@]}"
export python output small weights HAS_GPU SITE="${SITE:-}" SGLANG_FLAGS="${SGLANG_FLAGS:-}" SGLANG_WORKS="${SGLANG_WORKS:-}"
export SHARES="${SHARES:-}" AGAIN=
"$python" -I tools/gpu_schedule.py "$output" "$pack" "$((minutes * 60 - SECONDS))" "$started" \
    "$again" "${parts[@]}" &
schedule=$!
trap 'kill -TERM $schedule' TERM INT HUP # it ends the parts and writes the report
wait $schedule
result=$?
while kill -0 $schedule 2>/dev/null; do wait $schedule; result=$?; done # after a signal
exit $result
