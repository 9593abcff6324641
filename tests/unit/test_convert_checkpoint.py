"""Models that change their format keep every bit, whatever the layout, and what is damaged or
impossible is refused.
"""

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from ragen_mega.commands import convert as convert_command
from ragen_mega.commands import convert_checkpoint as tool
from ragen_mega.storage.checkpoints import CHECKPOINTS, FORMAT, STATE
from ragen_mega.storage.integrity import describe_file, write_manifest
from ragen_mega.storage.model_readers import open_model
from ragen_mega.storage.shard_files import file_name
from tests.support.converted_models import convert

ARCHITECTURES = ("qwen2_tied", "qwen2_untied", "qwen3_tied", "qwen3_untied")
CUTS = ((1, 1), (2, 1), (2, 2))
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "merges.txt",
    "chat_template.jinja",
)


def megatron(source: Path, target: Path, tp: int = 1, pp: int = 1, **flags) -> Path:
    return convert(
        source,
        target,
        "megatron",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        **flags,
    )


def model_config(architecture: str, **changes) -> PretrainedConfig:
    """Small, with a vocabulary that two ranks must pad."""
    name, tying = architecture.split("_")
    sizes = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tying == "tied",
    )
    return (Qwen2Config if name == "qwen2" else Qwen3Config)(
        **(sizes | ({"head_dim": 12} if name == "qwen3" else {}) | changes)
    )


def write_model(
    directory: Path, architecture: str, dtype: torch.dtype = torch.float32, **changes
) -> Path:
    """What transformers saves of a model with random weights, in several shards, and files beside
    it.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(architecture, **changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model.save_pretrained(directory, max_shard_size="30KB")
    for name in CARRIED:
        (directory / name).write_bytes(b"{} of " + name.encode())
    (directory / "generation_config.json").write_text('{"temperature": 0.7}')
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory, by safetensors itself."""
    return {
        name: value
        for path in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_round_trips_keep_every_bit(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    start = write_model(tmp_path / "start", architecture, dtype)
    expected = read(start)
    assert ("lm_head.weight" in expected) == architecture.endswith("untied")
    assert any("q_norm" in name for name in expected) == architecture.startswith("qwen3")
    before = start
    for tp, pp in CUTS:  # each from the one before, so that one cut is also made of another
        cut = megatron(before, tmp_path / f"tp{tp}pp{pp}", tp, pp)
        assert len(list(cut.glob("rank_*.safetensors"))) == tp * pp
        back = convert(cut, tmp_path / f"back_tp{tp}pp{pp}", "huggingface", max_shard_size=20_000)
        assert_equal(read(back), expected)
        assert (back / "config.json").read_bytes() == (start / "config.json").read_bytes()
        for name in CARRIED:
            assert (
                (cut / name).read_bytes()
                == (back / name).read_bytes()
                == (start / name).read_bytes()
            )
        reader = open_model(cut)  # what --load of training and evaluation opens
        assert_equal({name: reader(name) for name in reader.names()}, expected)
        before = cut
    assert_equal(
        dict(AutoModelForCausalLM.from_pretrained(back).named_parameters()),
        {
            name: value
            for name, value in AutoModelForCausalLM.from_pretrained(start).named_parameters()
        },
    )


def test_shards_and_their_index(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", "qwen3_untied")
    back = convert(start, tmp_path / "back", "huggingface", max_shard_size=20_000)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read(start).values())
    sizes = {}
    for path in back.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {name: path.name for name in file.keys()}.items() <= index["weight_map"].items()
            sizes[path.name] = [file.get_tensor(name).nbytes for name in file.keys()]
    assert len(sizes) > 3 and set(sizes) == set(index["weight_map"].values())
    assert all(sum(parts) <= 20_000 or len(parts) == 1 for parts in sizes.values())
    one = convert(back, tmp_path / "one", "huggingface")
    assert [path.name for path in one.glob("model*")] == ["model.safetensors"]


def test_a_type_is_changed_only_when_asked_for(tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", "qwen2_untied")
    narrow = megatron(start, tmp_path / "narrow", 2, dtype="bfloat16")
    back = convert(narrow, tmp_path / "back", "huggingface")
    assert_equal(read(back), {name: value.bfloat16() for name, value in read(start).items()})
    before, after = (json.loads((path / "config.json").read_text()) for path in (start, back))
    assert after == before | {"dtype": "bfloat16"}
    assert AutoModelForCausalLM.from_pretrained(back).dtype == torch.bfloat16
    wide = convert(back, tmp_path / "wide", "huggingface", dtype="float32")
    assert_equal(
        read(wide), {name: value.bfloat16().float() for name, value in read(start).items()}
    )


@pytest.mark.parametrize(
    "stated",
    [
        {"dtype": "float32", "torch_dtype": "float32"},
        {"torch_dtype": "float32"},
        {"dtype": "float32", "text_config": {"dtype": "float32", "torch_dtype": "float16"}},
        {"torch_dtype": "float16", "text_config": {"torch_dtype": "float32"}},
        {},
    ],
)
@pytest.mark.parametrize("format", ["huggingface", "megatron"])
def test_a_converted_config_states_one_type(stated: dict, format: str, tmp_path: Path) -> None:
    start = write_model(tmp_path / "start", "qwen2_untied")
    config = json.loads((start / "config.json").read_text())
    del config["dtype"]
    (start / "config.json").write_text(json.dumps(config | stated))
    for name in ("hf_quant_config.json", "quantize_config.json"):  # which SGLang would believe
        (start / name).write_text("{}")
    target = convert(start, tmp_path / "target", format, dtype="bfloat16")
    found: list[str] = []

    def note(entries: dict) -> dict:
        found.extend(value for name, value in entries.items() if name.endswith("dtype"))
        return entries

    after = json.loads((target / "config.json").read_text(), object_hook=note)
    assert set(found) == {"bfloat16"} and stated.keys() <= after.keys()
    assert AutoConfig.from_pretrained(target).dtype == torch.bfloat16
    assert not [*target.glob("*quant*_config.json")]


def flip_a_byte(path: Path, position: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(position * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def drop_a_tensor(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, path)


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_a_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"value_head.weight": torch.zeros(1, 32)}, path)


DAMAGE = {
    "architecture": (
        lambda path: edit_config(path, model_type="mixtral"),
        "model_type must be one of qwen2, qwen3",
    ),
    "unknown architecture": (
        lambda path: edit_config(path, model_type="nonsense"),
        "cannot read a model configuration",
    ),
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "cannot read a model configuration",
    ),
    "missing": (
        drop_a_tensor,
        r"lacks model.layers.0.self_attn.k_proj.weight; is it a complete qwen2",
    ),
    "config at odds": (
        lambda path: edit_config(path, num_hidden_layers=5),
        "cannot read a model configuration .*5",
    ),
    "too few layers": (
        lambda path: edit_config(path, num_hidden_layers=5, layer_types=["full_attention"] * 5),
        "lacks model.layers.4.input_layernorm.weight and 11",
    ),
    "unknown tensor": (
        add_a_tensor,
        "value_head.weight, .* qwen2",
    ),
    "shape": (
        lambda path: edit_config(path, intermediate_size=50),
        r"gate_proj.weight has shape \[48, 32\] .* \[50, 32\]",
    ),
    "cut short": (
        lambda path: os.truncate(path / "model.safetensors", 9000),
        "cannot read .*model.safetensors.*damaged",
    ),
    "header": (
        lambda path: flip_a_byte(path / "model.safetensors", 0.0),
        "cannot read .*model.safetensors.*damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, damage: str) -> None:
    start = convert(
        write_model(tmp_path / "start", "qwen2_untied"), tmp_path / "single", "huggingface"
    )
    harm, message = DAMAGE[damage]
    harm(start)
    with pytest.raises(ValueError, match=message):
        megatron(start, tmp_path / "target", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "single",
        "start",
    ]  # and nothing of the target is left


def test_every_damaged_byte_of_the_megatron_format_is_seen(tmp_path: Path) -> None:
    intact = megatron(write_model(tmp_path / "start", "qwen3_tied"), tmp_path / "intact", 2)
    for name in sorted(path.name for path in intact.iterdir()):
        content = (intact / name).read_bytes()
        flip_a_byte(intact / name, 0.6)
        for use in (
            lambda: convert(intact, tmp_path / "target", "huggingface"),
            lambda: open_model(intact),
        ):
            with pytest.raises(ValueError, match="SHA-256|cannot read"):
                use()
        (intact / name).write_bytes(content)
    (intact / "rank_00001.safetensors").unlink()
    with pytest.raises(ValueError, match="rank_00001.safetensors is missing"):
        open_model(intact)


@pytest.mark.parametrize(
    ("format", "flags", "message"),
    [
        ("megatron", {"tensor_model_parallel_size": 4}, r"key-value heads \(2\)"),
        ("megatron", {"tensor_model_parallel_size": 0}, "must be at least 1"),
        ("megatron", {"max_shard_size": 5}, "--max-shard-size .* megatron"),
        ("huggingface", {"tensor_model_parallel_size": 2}, "--tensor-.* huggingface"),
        ("peft", {"dtype": "float32"}, "--dtype means nothing with --format peft"),
        ("peft", {"base": Path("base")}, "--base means nothing with --format peft"),
        ("peft", {"pipeline_model_parallel_size": 2}, "--pipeline-.* peft"),
    ],
)
def test_impossible_flags_are_refused(
    tmp_path: Path, format: str, flags: dict, message: str
) -> None:
    start = write_model(tmp_path / "start", "qwen2_tied")
    with pytest.raises(ValueError, match=message):
        convert(start, tmp_path / "target", format, **flags)
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def test_a_target_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = write_model(tmp_path / "start", "qwen2_tied")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()
    with pytest.raises(ValueError, match="exists already"):
        convert(start, tmp_path / "target", "huggingface")
    (tmp_path / "target" / "precious").unlink()
    written = []

    def interrupt(self, slot, tensors) -> None:
        written.append(len(list((tmp_path / ".target.unfinished").glob("*rank_*"))))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tool.MegatronWriter, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            megatron(start, tmp_path / "target")
    assert written == [1] and not list((tmp_path / "target").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "target"]
    (tmp_path / ".target.unfinished").mkdir()
    with pytest.raises(ValueError, match="another conversion"):
        megatron(start, tmp_path / "target")
    (tmp_path / ".target.unfinished").rmdir()
    # an empty one may stand there
    assert_equal(read(convert(start, tmp_path / "target", "huggingface")), read(start))


def test_a_tied_head_that_is_stored_too(tmp_path: Path) -> None:
    start = convert(
        write_model(tmp_path / "start", "qwen2_tied"), tmp_path / "single", "huggingface"
    )
    tensors = load_file(start / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, start / "model.safetensors")
    assert_equal(
        read(convert(megatron(start, tmp_path / "a"), tmp_path / "b", "huggingface")), tensors
    )
    save_file(tensors | {"lm_head.weight": embedding + 1}, start / "model.safetensors")
    with pytest.raises(ValueError, match="the two differ"):
        megatron(start, tmp_path / "c")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    start = write_model(tmp_path / "start", "qwen2_tied")
    command = [
        "convert",
        "--from",
        str(start),
        "--to",
        str(tmp_path / "a" / "b"),
        "--format",
        "huggingface",
    ]
    monkeypatch.setattr(sys, "argv", [*command, "--max-shard-size", "20KB"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        convert_command.main()
        assert "from Hugging Face directory" in capsys.readouterr().out
        assert_equal(read(tmp_path / "a" / "b"), read(start))
        with pytest.raises(SystemExit) as left:
            convert_command.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/a/b exists already") and said.count("\n") == 1


@pytest.mark.parametrize("load", [None, "runs/gone"])
def test_a_checkpoint_is_named_from_wherever_one_is(
    load: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    start = write_model(tmp_path / "run" / "base", "qwen2_tied")
    checkpoint = tmp_path / "run" / CHECKPOINTS / "step_00000002"
    checkpoint.mkdir(parents=True)
    pieces = megatron(start, tmp_path / "pieces") / file_name(0)
    pieces.rename(checkpoint / pieces.name)
    (checkpoint / STATE).write_text("{}")
    config = {"model": {"load": load}}
    facts = {"format": FORMAT, "step": 2, "score": None, "config": config, "models": {}}
    write_manifest(
        checkpoint, facts, {path.name: describe_file(path) for path in checkpoint.iterdir()}
    )
    for number, (folder, name) in enumerate(
        [
            (tmp_path, "run"),
            (tmp_path / "run", "."),
            (tmp_path / "run", f"{CHECKPOINTS}/{checkpoint.name}"),
            (checkpoint.parent, checkpoint.name),
            (checkpoint, "."),
        ]
    ):
        monkeypatch.chdir(folder)
        assert_equal(read(convert(Path(name), tmp_path / str(number), "huggingface")), read(start))
        assert ("runs/gone is not here any more" in capsys.readouterr().out) == (load is not None)


def memory(field: str) -> int:
    """Bytes of this process that the kernel counts: VmRSS now, VmHWM at the highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_of(first, work) -> int:
    """Bytes by which a child process grows at most while it does `work`, mapped files included,
    once it has done `first`, which brings the code into its memory.
    """
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        first()
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM counts anew
        before = memory("VmRSS")
        work()
        send.send(memory("VmHWM") - before)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(200)
    assert process.exitcode == 0
    return receive.recv()


def test_peak_memory_is_below_two_layers_and_a_shard(tmp_path: Path) -> None:
    sizes = dict(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        vocab_size=2048,
    )
    start, shard = write_model(tmp_path / "start", "qwen2_untied", **sizes), 10_000_000
    tensors = read(start)
    layer = sum(
        value.nbytes for name, value in tensors.items() if name.startswith("model.layers.0.")
    )
    total, bound = sum(value.nbytes for value in tensors.values()), 2 * layer + shard
    assert total > 3 * bound
    small = write_model(tmp_path / "small", "qwen2_untied")
    small_cut, cut = tmp_path / "small_cut", tmp_path / "cut"
    peaks = [
        peak_of(lambda: megatron(small, small_cut, 2, 2), lambda: megatron(start, cut, 2, 2)),
        peak_of(
            lambda: convert(small_cut, tmp_path / "small_back", "huggingface"),
            lambda: convert(cut, tmp_path / "back", "huggingface", max_shard_size=shard),
        ),
    ]
    print(f"of {total} bytes at most {peaks} at once, allowed {bound}")
    assert max(peaks) < bound
    assert_equal(read(tmp_path / "back"), tensors)
