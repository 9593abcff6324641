"""The plan tool and the recipes per model size: what they state is what the plan computes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen_mega.config import parse, read_flags
from ragen_mega.config.cli import RECIPES as FOLDER
from ragen_mega.engines.embedded.kernels import BLOCK
from ragen_mega.models.shape import ModelShape
from ragen_mega.planning import answer as tool
from ragen_mega.planning.layouts import (
    DEFAULT,
    MARGIN,
    best,
    fits,
    layouts,
    ranked,
)
from ragen_mega.planning.memory import (
    CACHE_BLOCK,
    FILL,
    GIB,
    Capacity,
    Setting,
    check_fits,
    engine_bytes,
    fit,
    host_bytes,
    host_copies,
    plan,
    state_of,
)
from ragen_mega.planning.published import SHAPES, model_config
from ragen_mega.planning.time import default_play, step_seconds, total
from ragen_mega.run import build
from ragen_mega.run.placement import host_memory
from tests.support.plan_command import run_plan

H100S = Capacity(80 * GIB)
RECIPES = sorted(path.stem for path in FOLDER.glob("qwen*.flags"))


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(model_config(name).to_dict())


SLOW = ("qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_30b_a3b_32k", "qwen3_30b_a3b_128k")
"""Recipes whose layouts are many."""


def test_there_is_a_recipe_for_every_size() -> None:
    """One more is for fewer GPUs, four are for long contexts, and three have adapters, for one, two
    and four GPUs.
    """
    names = {name.lower().replace("-", "_") for name in SHAPES}
    adapted = {"qwen2.5_7b_lora": 1, "qwen2.5_32b_lora": 2, "qwen3_30b_a3b_lora": 4}
    others = {"qwen3_30b_a3b_8_gpus"}
    others |= {f"{model}_{k}k" for model in ("qwen2.5_7b", "qwen3_30b_a3b") for k in (32, 128)}
    assert names | others | {*adapted} == set(RECIPES)
    assert {name: tool.planned_gpus(name) for name in adapted} == adapted


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in RECIPES],
)
def test_recipe(name: str) -> None:
    """It parses, its layout divides model and GPUs, every phase fits, and its comments state the
    plan's numbers.
    """
    config, num_gpus = parse(["--recipe", name]), tool.planned_gpus(name)
    hf = model_config(config.model.load)
    setting = Setting.from_config(config, num_gpus)
    report = tool.examine(ModelShape.of(hf), setting, H100S)
    text = (FOLDER / f"{name}.flags").read_text()
    engine_tp = config.rollout.rollout_tensor_parallel_size
    assert report["fits"] and hf.num_attention_heads % engine_tp == 0 and num_gpus % engine_tp == 0
    words = tool.layout_words(report)
    assert f"GPUs of 80 GiB, {words}; predicted, not yet run on a GPU." in text
    assert f"# Memory: {tool.summary(report)}." in text
    assert config.parallel.bf16 and read_flags(FOLDER / f"{name}.flags")
    chosen = best(ModelShape.of(hf), config, num_gpus, H100S)
    shape, play = ModelShape.of(hf), default_play(config)
    own, least = (
        total(step_seconds(DEFAULT, shape, one, num_gpus, play)) for one in (config, chosen)
    )
    assert own < 1.25 * least, f"a much faster layout fits: {tool.layout_flags(chosen)}"


def test_the_best_layout_is_the_fastest_that_fits_with_fewest_stages() -> None:
    config, shape = parse(["--recipe", "qwen3_8b"]), shape_of("Qwen3-8B")
    room = Capacity(FILL * 80 * GIB)
    fitting = {
        sum(
            sum(terms.values())
            for terms in step_seconds(DEFAULT, shape, one, 8, default_play(config)).values()
        ): one
        for one in reversed(list(layouts(shape, config, 8)))
        if fits(shape, one, 8, room)
    }
    assert next(ranked(shape, config, 8, room))[0] == min(fitting)
    near = [
        (one.parallel.pipeline_model_parallel_size, seconds)
        for seconds, one in fitting.items()
        if seconds <= MARGIN * min(fitting)
    ]
    assert len({stages for stages, _ in near}) > 1, "the rule decides something"
    assert best(shape, config, 8, H100S) == fitting[min(near)[1]]


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "plan.json"
    base = (
        "--model",
        "Qwen2.5-7B",
        "--recipe",
        "none",
        "--bf16",
        "--tensor-model-parallel-size",
        "4",
        "--rollout-engine",
        "sglang",
    )
    code, said = run_plan(capsys, *base, "--json", str(report))
    result = json.loads(report.read_text())
    assert (
        code == 1
        and not result["fits"]
        and "add --use-distributed-optimizer; set --recompute full" in said
    )
    for phase, terms in result["terms_gib"].items():
        assert sum(terms.values()) == pytest.approx(result["phases_gib"][phase])
    fitting = (
        "--use-distributed-optimizer",
        "--recompute",
        "full",
        "--offload",
        "rollout",
        "--sequence-parallel",
    )
    code, said = run_plan(capsys, *base, *fitting)
    assert code == 0 and re.search(r"^fits: peak \d+\.\d+ of 80 GiB$", said, re.M)
    for flags, message in (
        (("--model", "Qwen9"), "error: the size of Qwen9"),
        ((*base, "--num-gpus", "6"), "world size (6)"),
        (
            ("--model", "Qwen2.5-3B", "--tensor-model-parallel-size", "4"),
            "key-value heads (2)",
        ),
        (("--model", "Qwen2.5-3B", "--tensor-parallel", "4"), "unknown flag --tensor-parallel"),
        (("--recipe", "nothing"), "--recipe must name"),
    ):
        code, said = run_plan(capsys, *flags)
        assert code == 2 and message in said and said.count("\n") == 1


def test_a_named_model_is_planned_on_the_gpus_of_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    model = ("--model", "Qwen2.5-1.5B", "--json", str(report))
    for flags, num_gpus in ((), 2), (("--num-gpus", "4"), 4):
        code, _ = run_plan(capsys, *model, *flags)
        assert code == 0 and json.loads(report.read_text())["num_gpus"] == num_gpus


def test_search_lists_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "search.json"
    flags = (
        "--model",
        "Qwen3-4B",
        "--num-gpus",
        "2",
        "--search",
    )
    code, said = run_plan(capsys, *flags, "--json", str(report))
    layouts = json.loads(report.read_text())["layouts"]
    listed = said.partition("best with room to spare")[0].partition("seconds  TP")[2].splitlines()
    assert code == 0 and len(listed) == len(layouts) + 1 and layouts
    seconds = [layout["predicted_seconds"] for layout in layouts]
    assert (
        seconds == sorted(seconds) and "best with room to spare: --recipe qwen3_4b --tensor" in said
    )
    assert all(layout["fits"] and layout["peak_gib"] <= 80 for layout in layouts)
    code, said = run_plan(capsys, *flags, "--gpu-memory-gb", "16")
    assert code == 1 and "no layout fits 16 GiB" in said and "does not fit: " in said


def told(
    capsys: pytest.CaptureFixture[str], report: Path, *argv: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON and what was printed."""
    code, said = run_plan(capsys, *argv, "--json", str(report))
    return code, json.loads(report.read_text()), said


def test_flags_come_over_the_recipe_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that says what the recipe says changes nothing, one that says something else only that;
    layouts are searched but for what flags say, and what is printed gives the same step.
    """
    report, model = tmp_path / "plan.json", ("--model", "Qwen2.5-1.5B", "--num-gpus", "2")
    _, plain, _ = told(capsys, report, *model)
    _, same, _ = told(capsys, report, *model, "--num-groups", "8")
    assert same["cost"] == plain["cost"] and plain["cost"]["workload"]["training"] == "bfloat16"
    code, other, said = told(
        capsys, report, *model, "--num-groups", "16", "--tensor-model-parallel-size", "2"
    )
    work = other["cost"]["workload"]
    assert code == 0 and other["tensor_parallel"] == 2 != plain["tensor_parallel"]
    assert (work["groups"], work["training"]) == (16, "bfloat16")
    line = re.search(r"^best with room to spare: (.*)$", said, re.M)[1]
    assert line == other["flags"] and "--num-groups 16 --tensor-model-parallel-size 2" in line
    _, again, _ = told(capsys, report, "--num-gpus", "2", *line.split())
    assert again["cost"]["seconds"] == other["cost"]["seconds"]
    code, alone, said = told(capsys, report, *model, "--gpu-memory-gb", "5")
    assert code == 1 and not alone["fits"] and "no layout fits 5 GiB" in said
    assert "does not fit: " in said
    flags = ("--model", "Qwen2.5-3B", "--num-gpus", "1", "--gpu-memory-gb", "24")
    code, large, _ = told(capsys, report, *flags, "--advantage-estimator", "grpo")
    assert code == 1 and " --optimizer-cpu-offload " in large["flags"]  # which needs least


def test_tasks_stand_for_an_environment_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}"}}\n' for n in range(10)))
    model = ("--model", "Qwen2.5-0.5B", "--num-gpus", "1")
    code, result, _ = told(capsys, tmp_path / "plan.json", *model, "--tasks", str(rows))
    assert code == 0 and f"--tasks {rows}" in result["flags"]
    assert parse(result["flags"].split()).environment.environments == f"tasks:{rows}"


def test_an_engine_of_its_own_takes_the_place_of_the_recipes_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with it what is said about servers, e.g. the size of their caches."""
    words = ("--model", "Qwen2.5-0.5B", "--num-gpus", "1", "--rollout-engine", "embedded")
    code, result, _ = told(capsys, tmp_path / "plan.json", *words)
    assert code == 0 and result["cost"]["workload"]["sampling"] == "embedded in bfloat16"
    assert parse(result["flags"].split()).rollout.kv_cache_tokens is None


@pytest.mark.parametrize("recipe", ["qwen2.5_14b", "qwen3_0.6b"])
def test_flags_of_a_layout_win_over_any_recipe(recipe: str) -> None:
    config = parse(["--recipe", "qwen3_8b"])
    flags = tool.layout_flags(config).split()
    other = parse(["--recipe", recipe, *flags])
    assert replace(other.parallel, fp8=config.parallel.fp8) == config.parallel
    assert other.train == config.train


def test_a_layout_keeps_what_is_given() -> None:
    config, shape = parse(["--bf16", "--recompute", "full", "--offload", "rollout"]), "Qwen3-8B"
    found = list(layouts(shape_of(shape), config, 8, {"recompute", "offload"}))
    assert {(one.parallel.recompute, one.parallel.offload) for one in found} == {
        ("full", "rollout")
    }
    assert {one.parallel.tensor_model_parallel_size for one in found} == {1, 2, 4, 8}
    long = parse(["--bf16", "--max-context-length", "32768"])
    tokens = {
        (one.parallel.context_parallel_size, one.train.max_tokens_per_microbatch)
        for one in layouts(shape_of(shape), long, 8)
    }
    assert {size for cp, size in tokens if cp == 1} == {32768}, "longer than what is usually tried"
    assert {(2, 16384), (4, 8192), (8, 4096)} <= tokens
    assert all(cp * size >= 32768 for cp, size in tokens)


LONG = {
    ("Qwen2.5-7B", 32768): 8,
    ("Qwen2.5-7B", 131072): 16,
    ("Qwen2.5-14B", 32768): 16,
    ("Qwen2.5-14B", 131072): 32,
    ("Qwen2.5-32B", 32768): 32,
    ("Qwen2.5-32B", 131072): 64,
    ("Qwen3-30B-A3B", 32768): 16,
    ("Qwen3-30B-A3B", 131072): 32,
}
"""Model and tokens of a context -> GPUs."""


@pytest.mark.parametrize(
    ("model", "tokens"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row != next(iter(LONG)))) for row in LONG],
)
def test_the_page_says_what_context_ranks_are_worth(
    model: str, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best layouts with and without them, in episodes that fill the context by turns of 800
    sampled tokens at most.
    """
    num_gpus, turns = LONG[model, tokens], f"--max-turns {30 * tokens // 32768}"
    flags = f"--max-context-length {tokens} {turns} --max-response-length 800"
    cache = "--kv-cache-tokens 1048576" * (tokens > 32768 and model != "Qwen2.5-7B")
    words = f"--model {model} --num-gpus {num_gpus} {flags} {cache}".split()
    code, result, said = told(capsys, tmp_path / "plan.json", *words)
    reports = result["context_ranks"]
    assert code == 0 and result["flags"] in {one["flags"] for one in reports.values()}
    page = (FOLDER.parents[2] / "docs/your_model.md").read_text()
    for name in ("with", "without"):
        row = f"| {model} | {tokens:,} | {num_gpus} | {name} | "
        if report := reports.get(name):
            step, trained, peak = (
                report[key] for key in ("predicted_seconds", "training_seconds", "peak_gib")
            )
            shown = f"{step:.1f} s a step, {trained:.1f} s of training, {peak:.1f} GiB a GPU, TP"
            assert f"{name} context ranks: {shown} " in said
            layout = tool.layout_words(report).partition(", rollout")[0]
            row += f"{step:.0f} | {trained:.1f} | {peak:.0f} | {layout} | {report['recompute']} |"
        else:
            row += "none fits | | | | |"
            assert f"{name} context ranks: no layout fits" in said
        assert row in page


def test_a_context_that_no_rank_holds_is_refused_with_its_remedy() -> None:
    flags = (
        "--bf16 --rollout-engine sglang --advantage-estimator grpo --max-context-length 131072"
        " --use-distributed-optimizer --offload rollout --recompute full"
        " --tensor-model-parallel-size 2 --sequence-parallel --kv-cache-tokens 262144"
    )
    shape, config = shape_of("Qwen2.5-7B"), parse(flags.split())
    with pytest.raises(ValueError, match="raise --context-parallel-size") as error:
        check_fits(shape, Setting.from_config(config, 8), 80 * GIB)
    assert "train actor" in str(error.value) and "\n" not in str(error.value)
    divided = parse([*flags.split(), "--context-parallel-size", "4"])
    check_fits(shape, Setting.from_config(divided, 8), 80 * GIB)


def test_a_search_divides_the_ranks_that_train_and_those_that_sample() -> None:
    flags = "--bf16 --rollout-engine sglang --placement separate --rollout-ranks 2"
    shape, config = shape_of("Qwen3-8B"), parse(flags.split())
    found = list(layouts(shape, config, 8))
    assert {one.parallel.rollout_ranks for one in found} == {2}
    assert {one.parallel.tensor_model_parallel_size for one in found} == {1, 2}
    assert {one.parallel.pipeline_model_parallel_size for one in found} >= {1, 2, 3, 6}
    assert {one.rollout.rollout_tensor_parallel_size for one in found} == {1, 2}


def test_a_search_leaves_engines_out_that_a_given_size_does_not_go_with() -> None:
    flags = "--bf16 --rollout-engine sglang --rollout-expert-parallel-size 8"
    shape = shape_of("Qwen3-30B-A3B")
    config = parse([*flags.split(), "--rollout-tensor-parallel-size", "8"])
    fixed = {"rollout_expert_parallel_size", "recompute", "offload"}
    sizes = {
        (one.rollout.rollout_tensor_parallel_size, one.rollout.rollout_expert_parallel_size)
        for one in layouts(shape, config, 8, fixed)
    }
    assert sizes == {(8, 8)}
    room = Capacity(80 * GIB, 8, 2000 * GIB)
    fastest = best(shape, config, 8, room)
    assert fastest is not None and fits(shape, fastest, 8, room)


def test_a_plan_of_a_recipe_leaves_the_working_directory_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    code, result, _ = told(capsys, tmp_path / "plan.json", "--recipe", "qwen2.5_1.5b")
    assert code == 0 and result["parameters"] == shape_of("Qwen2.5-1.5B").num_parameters


def test_a_directory_of_llama_is_planned_and_a_mixture_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama 3.1 8B has 8,030,261,248 parameters, as its model card says."""
    values = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 128256, "tie_word_embeddings": False, "attention_bias": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = ("--model", str(tmp_path), "--num-gpus", "8")
    code, result, said = told(capsys, tmp_path / "plan.json", *model)
    assert code == 0 and result["parameters"] == 8_030_261_248
    assert f"--recipe qwen3_8b --load {tmp_path}" in result["flags"], "the nearest in size"
    assert "refuses the model: attention_bias" in said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    code, said = run_plan(capsys, *model)
    assert code == 2 and "llama, mistral, not 'mixtral'" in said


@pytest.mark.parametrize(("num_gpus", "experts_gb"), [(8, 65.2), (16, 43.5)])
def test_experts_take_what_their_holders_leave_them(num_gpus: int, experts_gb: float) -> None:
    """By hand: 48 layers of 16 experts on a GPU, each 3 x 2048 x 768; weights and gradients 6 bytes
    an element, masters and moments 12 over the GPUs that hold the same experts.
    """
    shape = shape_of("Qwen3-30B-A3B")
    flags = "--bf16 --use-distributed-optimizer --expert-model-parallel-size 8"
    setting = Setting.from_config(parse(flags.split()), num_gpus)
    held = 48 * 16 * 3 * 2048 * 768
    around = shape.num_parameters - 8 * held
    expected = held * (6 + 12 * 8 / num_gpus)
    assert expected / 1e9 == pytest.approx(experts_gb, abs=0.05)
    state = sum(state_of(shape, setting, 0, is_critic=False))
    assert state == pytest.approx(expected + around * (6 + 12 / num_gpus), rel=1e-4)


def test_a_mixture_is_planned_and_what_would_help_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, model = tmp_path / "plan.json", ("--model", "Qwen3-30B-A3B", "--num-gpus", "8")
    layout = ("--expert-model-parallel-size", "4", "--pipeline-model-parallel-size", "1")
    layout += ("--no-optimizer-cpu-offload",)
    words = (*model, *layout, "--advantage-estimator", "grpo", "--recompute", "full")
    code, result, said = told(capsys, report, *words)
    assert code == 1 and result["expert_parallel"] == 4 and ", EP 4, DP " in said
    for remedy in ("raise --expert-model-parallel-size", "--optimizer-cpu-offload", "more GPUs"):
        assert any(remedy in advice for advice in result["remedies"]["train actor"])
        assert remedy in said
    code, result, said = told(capsys, report, *words, "--hardware", "H200")
    assert code == 0 and result["fits"]
    recipe = ("--recipe", "qwen3_30b_a3b_8_gpus", "--recompute", "full")
    parked, held = (
        told(capsys, report, *recipe, f"--{no}optimizer-cpu-offload")[1] for no in ("", "no-")
    )
    # three float32 numbers of an eighth of nearly all elements, but for the part on its way
    state = 12 * 30.5e9 / 8 / GIB
    assert held["peak_gib"] - parked["peak_gib"] == pytest.approx(state, rel=0.1)
    assert parked["host_gib_per_rank"] - held["host_gib_per_rank"] == pytest.approx(state, rel=0.01)


def test_a_plan_that_does_not_fit_is_an_error_with_its_remedy() -> None:
    config = parse(["--bf16", "--rollout-engine", "sglang", "--advantage-estimator", "grpo"])
    shape = shape_of("Qwen2.5-7B")
    setting = Setting.from_config(config, 1)
    with pytest.raises(ValueError) as error:
        check_fits(shape, setting, 80 * GIB)
    message = str(error.value)
    assert re.match(r"the plan needs \d+\.\d GiB of 80\.0 .* train actor \(activations", message)
    assert "--recompute full; lower --max-tokens-per-microbatch" in message and "\n" not in message
    check_fits(shape, setting, 1000 * GIB)


@pytest.mark.parametrize("size", [16, 1_000_000])
def test_more_trajectories_than_the_cache_has_pages_for_are_refused_by_their_flag(
    size: int,
) -> None:
    """A page of every trajectory has to be there; that all contexts fill up may never happen."""
    assert CACHE_BLOCK == BLOCK
    config = parse(["--group-size", str(size), "--recipe", "bandit", "--minibatch-size", "16"])
    shape = ModelShape.from_config(config.model.small_model(vocab_size=512))
    setting = Setting.from_config(config, 2, on_host=True)
    if size == 16:
        assert not check_fits(shape, setting, 24 * GIB)
        return
    refusal = r"phase rollout \(key-value cache .*lower --group-size"
    with pytest.raises(ValueError, match=refusal):
        check_fits(shape, setting, 24 * GIB)
    with pytest.raises(ValueError, match=refusal):  # a server takes its whole cache at its start
        check_fits(shape, replace(setting, engine="sglang"), 24 * GIB)


def test_a_small_cache_of_a_server_lets_no_absurd_group_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All trajectories of a step are on rank 0, whatever waits for the engine."""
    flags = ["--rollout-engine", "sglang", "--kv-cache-tokens", "100000", "--group-size"]
    monkeypatch.setattr(build, "device_capacity", lambda: 80 * GIB)
    monkeypatch.setattr(build, "host_memory", lambda: 24 * GIB)
    assert build.fit_memory(parse([*flags, "16"]), SMOLLM2).rollout.group_size == 16
    refusal = r"8\) x group_size \(1000000\) = 8000000 .* 30\.5 GiB .* 24\.0; lower --group-size"
    with pytest.raises(ValueError, match=refusal):
        build.fit_memory(parse([*flags, "1000000"]), SMOLLM2)


def test_offloading_empties_the_other_phases() -> None:
    shape = shape_of("Qwen2.5-7B")
    totals = {}
    for mode in ("none", "rollout", "turns"):
        config = parse(["--bf16", "--rollout-engine", "sglang", "--offload", mode])
        setting = Setting.from_config(config, 1)
        totals[mode] = {phase: sum(terms.values()) for phase, terms in plan(shape, setting).items()}
    actor, critic = (
        sum(state_of(shape, setting, 0, is_critic=is_critic)) for is_critic in (False, True)
    )
    assert totals["none"]["rollout"] - totals["rollout"]["rollout"] == actor + critic
    assert totals["rollout"]["train actor"] - totals["turns"]["train actor"] == critic
    assert totals["rollout"]["train critic"] - totals["turns"]["train critic"] == actor
    parameters = state_of(shape, setting, 0, is_critic=False).parameters
    assert totals["none"]["sync"] - totals["rollout"]["sync"] == actor + critic - parameters


def test_a_teacher_takes_its_parameters_and_one_that_is_too_large_is_refused() -> None:
    """Where it lies, for each mode of offloading."""
    shape, large = shape_of("Qwen2.5-1.5B"), shape_of("Qwen2.5-32B")
    flags = ["--bf16", "--rollout-engine", "sglang", "--advantage-estimator", "grpo"]
    taught = [*flags, "--reward", "environment + teacher", "--teacher-load", "owner/model"]
    own = [*flags, "--reward", "environment + teacher", "--teacher-prompt-examples", "2"]
    size = 0
    for mode in ("none", "rollout", "turns"):
        without = Setting.from_config(
            parse([*own, "--offload", mode.replace("turns", "rollout")]), 1
        )
        assert without.has_reference and not without.teachers
        setting = Setting.from_config(parse([*taught, "--offload", mode]), 1)
        assert not setting.has_reference and not setting.teachers  # the hub's has no size yet
        setting = replace(setting, teachers=((large, 1.0),))
        size = state_of(large, setting, 0, is_critic=False).parameters
        assert size > 64e9
        before, after = (
            {phase: sum(terms.values()) for phase, terms in plan(shape, each).items()}
            for each in (replace(setting, teachers=()), setting)
        )
        more = {phase: after[phase] - before.get(phase, 0) for phase in after}
        on_device = {
            "none": {"train actor", "sync", "rollout"},
            "rollout": {"train actor"},
            "turns": {"score"},
        }[mode]
        assert {phase for phase, change in more.items() if change} == on_device
        assert all(more[phase] == size for phase in on_device - {"score"})
        assert more.get("score", size + 1) > size
        two = replace(setting, teachers=((large, 0.5), (shape, 0.5)))
        copies = [
            host_copies(shape, each, 0) for each in (replace(setting, teachers=()), setting, two)
        ]
        smaller = state_of(shape, setting, 0, is_critic=False).parameters
        on_host = (0, 0) if mode == "none" else (size, smaller)
        assert (copies[1] - copies[0], copies[2] - copies[1]) == on_host
        together = {phase: sum(terms.values()) for phase, terms in plan(shape, two).items()}
        if mode == "turns":  # one at a time
            assert together == after
        else:
            assert together["train actor"] - after["train actor"] == smaller
        with pytest.raises(ValueError, match="give a smaller --teacher-load") as error:
            check_fits(shape, setting, 40 * GIB)
        assert "\n" not in str(error.value)


def test_fp8_keeps_copies_of_the_linear_weights() -> None:
    shape = shape_of("Qwen3-8B")
    flags = ["--bf16", "--advantage-estimator", "grpo"]
    with_fp8, without = (
        plan(shape, Setting.from_config(parse([*flags, "--fp8", fp8]), 1))["train actor"]
        for fp8 in ("hybrid", "none")
    )
    linear = shape.num_layers * (4096 * 4096 * 2 + 4096 * 2 * 8 * 128 + 3 * 4096 * 12288)
    assert sum(with_fp8.values()) - sum(without.values()) == with_fp8["FP8 weights"] == 2 * linear


@pytest.mark.parametrize(
    ("offload", "training", "resting"), [("none", 2, 2), ("rollout", 2, 0), ("turns", 1, 0)]
)
def test_copies_in_fp8_are_where_their_model_is(offload: str, training: int, resting: int) -> None:
    shape = shape_of("Qwen3-8B")
    flags = ["--bf16", "--rollout-engine", "sglang", "--offload", offload]
    plans = [
        plan(shape, Setting.from_config(parse([*flags, "--fp8", fp8]), 1))
        for fp8 in ("hybrid", "none")
    ]
    totals = [{phase: sum(terms.values()) for phase, terms in phases.items()} for phases in plans]
    copies = 2 * shape.num_layers * sum(shape.layer_sizes(matrices=True))
    for phase, count in (
        ("train actor", training),
        ("train critic", training),
        ("sync", resting),
        ("rollout", resting),
    ):
        assert totals[0][phase] - totals[1][phase] == count * copies


def test_an_engine_in_fp8_and_a_copy_of_its_weights_on_the_host() -> None:
    shape = shape_of("Qwen3-8B")
    flags = ["--bf16", "--rollout-engine", "sglang", "--rollout-tensor-parallel-size", "2"]
    plain, fp8, kept = (
        Setting.from_config(parse([*flags, *more]), 2)
        for more in ((), ("--rollout-fp8",), ("--weight-transfer", "file"))
    )
    linear = shape.num_layers * (4096 * 4096 * 2 + 4096 * 2 * 8 * 128 + 3 * 4096 * 12288)
    weights = engine_bytes(shape, plain)[0]
    assert weights == shape.num_parameters and engine_bytes(shape, fp8)[0] == weights - linear // 2
    assert host_bytes(shape, kept) - host_bytes(shape, plain) == weights


@pytest.mark.parametrize(("offload", "copies"), [("none", 1), ("rollout", 2)])
def test_a_checkpoint_on_its_way_to_the_disk_is_in_host_memory(offload: str, copies: int) -> None:
    """Weights in bfloat16, their masters and Adam's moments in float32."""
    shape = shape_of("Qwen3-8B")
    flags = ("--bf16", "--advantage-estimator", "grpo", "--offload", offload)
    setting = Setting.from_config(parse(flags), 1)
    expected = copies * (2 + 3 * 4) * shape.num_parameters
    assert host_bytes(shape, setting) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "ranks", "writers"),
    [
        ("--use-distributed-optimizer", 8, 1),
        ("--tensor-model-parallel-size 2 --use-distributed-optimizer", 8, 2),
        ("--pipeline-model-parallel-size 4 --use-distributed-optimizer", 8, 4),
        ("--use-distributed-optimizer", 16, 1),
    ],
)
def test_a_node_holds_one_copy_of_a_checkpoint_and_what_each_rank_parks(
    flags: str, ranks: int, writers: int
) -> None:
    """Of eight GPUs: one data-parallel rank writes each part, and all park theirs."""
    shape = shape_of("Qwen3-8B")
    base = "--bf16 --advantage-estimator grpo --offload rollout".split()
    setting = Setting.from_config(parse([*base, *flags.split()]), ranks)
    states = [
        state_of(shape, setting, stage, is_critic=False) for stage in range(setting.parallel.cut.pp)
    ]
    parked = max(state.parameters + state.optimizer for state in states)
    whole = 14 * shape.num_parameters  # weights in bfloat16, masters and moments in float32
    found = host_bytes(shape, setting, 8)
    assert found == pytest.approx(8 * parked + whole, rel=0.12)
    assert host_bytes(shape, setting) == pytest.approx(parked + whole / writers, rel=0.12)


@pytest.mark.parametrize(
    ("ranks", "flags", "versions", "parts"),
    [
        (8, "", 3, 1),
        (64, "--weight-senders 2", 3, 2),
        (64, "--weight-senders 16", 3, 8),  # two of a node
        (64, "--lora-rank 8 --lora-sync adapter", 1, 1),  # the frozen model
    ],
)
def test_a_node_holds_its_share_of_the_weights_for_ranks_that_only_sample(
    ranks: int, flags: str, versions: int, parts: int
) -> None:
    shape = shape_of("Qwen3-8B")
    base = "--bf16 --rollout-engine sglang --placement separate --rollout-ranks 2".split()
    base += "--importance-cap 2 --max-staleness 2".split()
    config = parse([*base, *flags.split()])
    setting = Setting.from_config(config, ranks)
    found = host_bytes(shape, setting, 8) - host_bytes(shape, replace(setting, versions=0), 8)
    assert found == pytest.approx(versions * shape.engine_weights(2, 1) / parts)


def test_a_node_without_room_on_the_host_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models of 30B with Adam's state on one node, and what its eight ranks park: 1.5 TB."""
    words = ("--recipe", "qwen3_30b_a3b")
    code, result, said = told(capsys, tmp_path / "plan.json", *words)
    assert code == 0 and result["host_gib_per_node"] == pytest.approx(1534, abs=1)
    assert "host memory of a node       1533.82 of 1600" in said
    code, result, said = told(capsys, tmp_path / "plan.json", *words, "--host-memory-gb", "1500")
    assert code == 1 and not result["fits"]
    assert "host memory does not fit: set --offload none" in said


SMOLLM2 = ModelShape.from_config(
    {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "vocab_size": 49152, "tie_word_embeddings": True,
    }
)  # fmt: skip


def test_a_microbatch_is_chosen_that_fits_into_the_machine() -> None:
    """Of 20 GiB two ranks with 16384 positions each would need more."""
    config = parse(["--advantage-estimator", "grpo", "--bf16"])
    fitted, lines = fit(config, SMOLLM2, 2, 10 * GIB, on_host=True)
    assert fitted.train.max_tokens_per_microbatch == 4096
    assert fitted.parallel.recompute == "none"
    assert lines[0].startswith("memory: 4096 positions a microbatch, recomputation none")
    roomy, _ = fit(config, SMOLLM2, 2, 100 * GIB, on_host=True)
    assert roomy.train.max_tokens_per_microbatch == 16384
    tight, _ = fit(config, SMOLLM2, 2, 5 * GIB, on_host=True)
    assert tight.parallel.recompute == "full"
    assert tight.train.max_tokens_per_microbatch >= config.rollout.max_context_length


@pytest.mark.parametrize("flag", ["--max-tokens-per-microbatch 16384 --recompute none", "--bf16"])
def test_a_flag_that_does_not_fit_is_refused_with_the_numbers(flag: str) -> None:
    config = parse(["--advantage-estimator", "grpo", *flag.split()])
    with pytest.raises(ValueError, match=r"needs .* GiB of 3\.0 GiB in phase train actor.*fewer"):
        fit(config, SMOLLM2, 2, 3 * GIB, on_host=True)


@pytest.mark.parametrize(
    ("listed", "file"),
    [
        ("0::/job/step\n", "sys/fs/cgroup/job/memory.max"),
        ("4:cpu,memory:/job\n0::/\n", "sys/fs/cgroup/cpu,memory/memory.limit_in_bytes"),
    ],
)
def test_memory_is_what_the_control_groups_allow(tmp_path: Path, listed: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(listed)
    whole = host_memory(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("max\n")
    assert host_memory(tmp_path) == whole
    (tmp_path / file).write_text(f"{2**28}\n")
    assert host_memory(tmp_path) == 2**28


def test_a_gpu_that_samples_holds_nothing_of_those_that_train() -> None:
    """By hand: the driver, one group of NCCL, graphs, workspace, weights of TP 2, and the cache."""
    shape, flags = shape_of("Qwen2.5-7B"), "--bf16 --rollout-engine sglang"
    flags += " --rollout-tensor-parallel-size 2 --kv-cache-tokens 100000"
    apart = " --placement separate --rollout-ranks 2 --importance-cap 2"
    beside, separate = (
        plan(shape, Setting.from_config(parse((flags + more).split()), 6)) for more in ("", apart)
    )
    weights, cache = shape.engine_weights(2, 2), 100_000 * shape.kv_cache_bytes(2, 2)
    own = int(1.5 * GIB) + GIB + 2 * int(1.5 * GIB) + weights
    assert sum(separate["rollout"].values()) == own + cache
    assert sum(separate["sync"].values()) - own == separate["sync"]["buffers"] < GIB
    # a second driver context, and the server's graphs
    engine = beside["train actor"]["engine's CUDA graphs"] + int(1.5 * GIB)
    sent = separate["train actor"].pop("weights on their way")
    assert sum(beside["train actor"].values()) - engine == sum(separate["train actor"].values())
    assert sent == shape.engine_weights(2, 1)
