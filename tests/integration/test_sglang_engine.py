"""The engine over the real, unmodified SGLang server on a CPU, against transformers: numbers,
weights, death and orphans.

Needs an environment with SGLang: bash tools/setup_sglang_cpu.sh, then
RAGEN_SGLANG_PYTHON=.venv-sglang/bin/python.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from ragen_mega.data.types import Completion, SamplingParams, in_groups
from ragen_mega.engines.sglang import supervisor, weight_loader
from ragen_mega.engines.sglang.engine import SGLangEngine
from ragen_mega.engines.sglang.fp8_blocks import QUANTIZATION_CONFIG
from ragen_mega.engines.sglang.http_json import RequestRefused
from ragen_mega.engines.sglang.server import ServerFailed, SGLangServer
from ragen_mega.engines.sglang.weights import BucketMessage, IpcTransfer, send
from ragen_mega.environments.episode import Episode, EpisodeConfig
from ragen_mega.environments.registry import make
from ragen_mega.rollout.collector import Collection
from ragen_mega.rollout.engine import EngineShard
from ragen_mega.rollout.player import PlaySettings
from ragen_mega.rollout.renderer import ChatRenderer
from ragen_mega.rollout.tasks import tasks_for_group
from tests.support.processes import command_of, is_alive, wait_until
from tests.support.sglang_server import (
    CONFIG,
    DEVICE,
    IS_CUDA,
    MAX_CONTEXT,
    OTHER_FAMILIES,
    PYTHON,
    TOLERANCE,
    VOCAB,
    build_model,
    check_logprobs,
    converse,
    converse_all,
    needs_sglang,
    random_tokens,
    settings,
    shards,
    users_server,
)
from tests.support.small_policy import lake_tokenizer

pytestmark = needs_sglang

ROOT = Path(__file__).parents[2]
BUCKET = 64 * 1024
same_on_a_cpu = pytest.mark.skipif(
    IS_CUDA, reason="the device makes no difference, and each server takes its time to start"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """For all tests of this file, because a server takes half a minute to start."""
    engine = start(tmp_path_factory.mktemp("file"), "file")
    yield engine
    engine.shutdown()


def start(directory: Path, transfer: Literal["file", "ipc"]) -> SGLangEngine:
    return SGLangEngine(CONFIG, settings(directory), transfer=transfer, bucket_bytes=BUCKET)


@pytest.mark.slow
def test_logprobs_follow_transformers_over_turns_weights_and_sleep(engine: SGLangEngine) -> None:
    for version, temperature in ((1, 1.0), (2, 0.7), (3, 1.3)):
        model = build_model(version)
        with engine.awake():
            engine.load_weights(shards(model))
            engine.start()
            assert engine.weight_version == version
            before = engine.counts.cached_tokens, engine.counts.prompt_tokens
            conversations = converse_all(engine, temperature=temperature)
            cached, prompts = (
                now - then
                for now, then in zip(
                    (engine.counts.cached_tokens, engine.counts.prompt_tokens), before, strict=True
                )
            )
        for turns in conversations:
            for prompt, answer in turns:
                stopped = answer.tokens[-1] in (7, 8)
                assert answer.finish_reason == ("stop" if stopped else "length")
                assert stopped or len(answer.tokens) == 12
                assert not {7, 8} & set(answer.tokens[:-1])
                check_logprobs(model, prompt, answer, temperature)
        # At the least the second and third turn find what came before them.
        assert cached > prompts / 2
    assert engine.server.num_starts == 1 and engine.counts.restarts == 0


@pytest.mark.parametrize(
    "device", [pytest.param(DEVICE, marks=() if IS_CUDA else pytest.mark.slow)]
)
def test_users_servers_follow_transformers(device: str, tmp_path: Path) -> None:
    """Its weights come through a process group, NCCL's where no rank shares its device."""
    build_model(1).save_pretrained(tmp_path / "model")
    with users_server(tmp_path / "model", tmp_path / "server") as (address, _):
        if torch.cuda.device_count() > 1:
            torch.cuda.set_device(1)
        given = settings(tmp_path, address=address)
        engine = SGLangEngine(CONFIG, given, bucket_bytes=BUCKET)
        for version in (2, 3):
            model = build_model(version)
            with engine.awake():
                engine.load_weights(model.state_dict().items())
                engine.start()
                for turns in converse_all(engine):
                    for prompt, answer in turns:
                        check_logprobs(model, prompt, answer, 1.0)
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families_follow_transformers(family: str, tmp_path: Path) -> None:
    config = OTHER_FAMILIES[family]
    engine = SGLangEngine(config, settings(tmp_path), transfer="file", bucket_bytes=BUCKET)
    try:
        for version in (1, 2):
            model = build_model(version, config)
            with engine.awake():
                engine.load_weights(shards(model))
                engine.start()
                for turns in converse_all(engine):
                    for prompt, answer in turns:
                        check_logprobs(model, prompt, answer, 1.0)
    finally:
        engine.shutdown()


def test_greedy_answers_nucleus_and_a_full_context(engine: SGLangEngine) -> None:
    model = build_model(4)
    prompt = random_tokens(random.Random(5), MAX_CONTEXT - 10)

    async def ask() -> list[Completion]:
        asked = (
            (prompt, SamplingParams(50, temperature=0.0)),
            (prompt[:20], SamplingParams(40, top_p=0.3)),
            (prompt + prompt[:10], SamplingParams(5)),
        )
        return await asyncio.gather(
            *(
                engine.generate(tokens, sampling, session=i)
                for i, (tokens, sampling) in enumerate(asked)
            )
        )

    with engine.awake():
        engine.load_weights(shards(model))
        engine.start()
        greedy, nucleus, full = asyncio.run(ask())
        last_is_stop = SamplingParams(2, temperature=0.0, stop_token_ids=(greedy.tokens[1],))
        stopped = asyncio.run(engine.generate(prompt, last_is_stop, session=0))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + greedy.tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(greedy.tokens)[:, None])[
        :, 0
    ]  # in bfloat16 a tie may fall the other way
    assert (
        bool((chosen >= logits.amax(-1) - (TOLERANCE if IS_CUDA else 0.0)).all())
        and greedy.finish_reason == "length"
    )
    assert len(greedy.tokens) == 10
    check_logprobs(model, prompt, greedy, 1.0)
    check_logprobs(
        model, prompt[:20], nucleus, 1.0
    )  # of the whole distribution, as the trainer has it
    assert full == Completion([], [], "length")
    if (
        not IS_CUDA
    ):  # a prompt that is cached takes other kernels, and bfloat16 may then choose otherwise
        assert stopped.tokens == greedy.tokens[:2]
        assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) <= 2


@pytest.mark.gpu
@pytest.mark.silicon
def test_a_sleeping_server_gives_its_memory_back(tmp_path: Path) -> None:
    """Of the whole device, so that memory of the server's processes counts: asleep it lacks far
    less than awake.
    """
    cache_tokens = 2**21
    cache_bytes = (
        2 * cache_tokens * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * 16 * 2
    )  # heads of 16, two bytes
    engine = SGLangEngine(
        CONFIG,
        settings(tmp_path, kv_cache_tokens=cache_tokens),
        transfer="ipc",
        bucket_bytes=64 * 1024,
    )
    model = build_model(8)

    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    try:
        asleep = []
        for _ in range(3):
            with engine.awake():
                engine.load_weights(shards(model))
                loaded = free()
                engine.start()
                for turns in converse_all(engine):
                    for prompt, answer in turns:
                        check_logprobs(model, prompt, answer, 1.0)
                awake = free()
            # A server takes its cache when it starts for the first time, and then not before start.
            assert not asleep or loaded - awake > 0.9 * cache_bytes
            asleep.append(free())
            assert asleep[-1] - awake > 0.9 * cache_bytes
        assert (
            max(asleep) - min(asleep) < 0.1 * cache_bytes
        )  # and nothing is lost from one sleep to the next
        assert engine.server.num_starts == 1
    finally:
        engine.shutdown()


def test_what_cannot_be_generated_or_loaded_is_said(engine: SGLangEngine, tmp_path: Path) -> None:
    weights = dict(shards(build_model(5)))

    def load(changed: dict[str, torch.Tensor]) -> None:
        engine.load_weights(changed.items())

    def generate(tokens: list[int]) -> Completion:
        return asyncio.run(engine.generate(tokens, SamplingParams(1), session=0))

    with pytest.raises(RuntimeError, match="asleep"):
        load(weights)
    with engine.awake():
        for too_early in (engine.start, lambda: generate([1])):
            with pytest.raises(RuntimeError, match="is awake and must be .*call load_weights"):
                too_early()
        with pytest.raises(ValueError, match="missing: model.norm.weight"):
            load({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"})
        with pytest.raises(ValueError, match="weight 'wte' came with shape"):
            load(weights | {"wte": torch.zeros(1)})
        with pytest.raises(ValueError, match="takes each of its"):
            load(weights | {"model.norm.weight": torch.zeros(32)})
        with pytest.raises(
            RequestRefused, match="rank 0 of the SGLang server did not take .*FileNotFoundError"
        ):
            missing = tmp_path / "no.json"
            body = base64.b64encode(pickle.dumps([(str(missing), torch.empty(0))])).decode()
            send(engine.server.client, [[BucketMessage(missing, body, is_last=True)]], 9)
        load(weights)
        with pytest.raises(RuntimeError, match="is loaded and must be started"):
            generate([1])
        for _ in range(2):  # safe to call again
            engine.start()
        with pytest.raises(ValueError, match="token ids must lie"):
            generate([VOCAB])
        assert len(generate([1]).tokens) == 1


def test_the_server_is_private(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback only, no key for others to read, nothing of the trainer's environment."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("PYTHONPATH", "/trainer")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH", "WANDB_API_KEY"} & set(
        engine.server.settings.environment(Path("file"))
    )
    with engine.awake():
        pids = [engine.server.pid, *supervisor.descendants(engine.server.pid)]
        assert len(pids) >= 4  # supervisor, HTTP server, scheduler, detokenizer
        client = engine.server.client
        key = client._authorization.removeprefix("Bearer ")
        for pid in pids:
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        addresses = listening_addresses(pids)
        assert addresses and set(addresses) == {"0100007F"}, addresses  # 127.0.0.1
        with pytest.raises(RequestRefused, match="401"):
            type(client)(client.address, "Bearer wrong").call("GET", "/model_info", timeout=60)
    for path in engine.server.settings.directory.glob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def listening_addresses(pids: list[int]) -> list[str]:
    """Hexadecimal local addresses of the TCP sockets on which the processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    renderer = ChatRenderer(lake_tokenizer(episode), think=True)
    assert len(renderer.tokenizer) <= VOCAB
    return renderer


def episode() -> Episode:
    return Episode(
        make("frozen_lake", success_rate=1.0),
        EpisodeConfig(prompt_style="compact", max_turns=3, max_response_length=20),
    )


@same_on_a_cpu
def test_weights_through_a_shared_buffer(engine: SGLangEngine) -> None:
    """The server takes them in either way, so these come past the engine."""
    transfer = IpcTransfer(CONFIG, EngineShard(), torch.float32, bucket_bytes=BUCKET)
    with engine.awake():
        engine.load_weights(shards(build_model(1)))
        engine.start()
        for seed in (2, 3):
            model = build_model(seed)
            buckets = transfer.receive(shards(model))
            send(engine.server.client, buckets, engine.weight_version)
            for prompt, answer in asyncio.run(converse(engine, seed, temperature=1.0)):
                check_logprobs(model, prompt, answer, 1.0)
    transfer.close()


# Without a real server tests/unit/test_sglang_life.py has the same.
@same_on_a_cpu
@pytest.mark.slow
def test_a_rollout_survives_sigkill_of_the_server(
    engine: SGLangEngine, renderer: ChatRenderer
) -> None:
    """With files the engine has a copy of the weights for the next server."""
    check_a_kill(engine, renderer, num_sent_again=0)


# Without a GPU tests/unit/test_sglang_life.py has the same with a server that starts at once.
@(pytest.mark.gpu if IS_CUDA else pytest.mark.slow)
def test_a_shared_buffer_is_filled_again_after_sigkill(
    renderer: ChatRenderer, tmp_path: Path
) -> None:
    engine = start(tmp_path, "ipc")
    try:
        check_a_kill(engine, renderer, num_sent_again=1)
    finally:
        engine.shutdown()


def check_a_kill(engine: SGLangEngine, renderer: ChatRenderer, num_sent_again: int) -> None:
    """Kill the server's scheduler in the middle of a rollout, which goes on to its end."""
    tasks = [
        task
        for group in range(2)
        for task in tasks_for_group(group, "frozen_lake", group, episode, group_size=4)
    ]
    model = build_model(6)
    restarts = engine.counts.restarts
    turns, killed, sent_again = [], [], []

    def send_again() -> None:
        sent_again.append(len(turns))
        engine.pause()
        engine.load_weights(shards(model), again=True)
        engine.start()

    def kill_once(num_tokens: int, is_over: bool) -> None:
        """Once somebody is sure to ask again: others may all have their last answers by now."""
        turns.append(is_over)
        if len(turns) > len(tasks) and not is_over and not killed:
            scheduler = next(
                pid
                for pid in supervisor.descendants(engine.server.pid)
                if "scheduler" in command_of(pid)
            )
            os.kill(scheduler, signal.SIGKILL)
            killed.append(scheduler)

    with engine.awake():
        engine.load_weights(shards(model))
        engine.start()
        version, old = (
            engine.weight_version,
            [engine.server.pid, *supervisor.descendants(engine.server.pid)],
        )
        settings = PlaySettings(MAX_CONTEXT, 1.0, 1)
        with Collection(engine, renderer, tasks, settings, advance=kill_once) as collection:
            while not collection.play():
                send_again()
            groups = in_groups(collection.trajectories())
        assert len(sent_again) == num_sent_again
        assert engine.counts.restarts == restarts + 1 and engine.counts.reissued > 0
        assert engine.weight_version == version
        assert not any(map(is_alive, old))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    assert [len(group.trajectories) for group in groups] == [4, 4] and sum(turns) == len(tasks)
    for trajectory in trajectories:
        assert trajectory.terminated or trajectory.truncated
        for turn in trajectory.turns:  # each once, and from the same weights on both servers
            span = slice(turn.start, turn.end)
            answer = Completion(trajectory.tokens[span], trajectory.rollout_logprobs[span], "stop")
            check_logprobs(model, trajectory.tokens[: turn.start], answer, 1.0)


def test_shutdown_leaves_nothing(engine: SGLangEngine) -> None:
    with engine.awake():
        pids = [engine.server.pid, *supervisor.descendants(engine.server.pid)]
    store = engine._transfer.directory
    assert store.is_dir()
    engine.shutdown()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert not store.exists()


@same_on_a_cpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--tp 2 --model x --mem-fraction-static 0.8", "must not change model_path, tp_size,"),
        ("--nope", "does not take .* unrecognized"),
        ("--schedule-policy fcfs", None),
    ],
)
def test_the_servers_parser_judges_further_arguments(
    given: str, message: str | None, tmp_path: Path
) -> None:
    server = settings(tmp_path, command_line=given.split())
    if message is None:
        server.check_command_line()
    else:
        with pytest.raises(ValueError, match=message):
            server.check_command_line()


@pytest.mark.slow  # it changes with SGLang alone
def test_the_loader_knows_the_scales_of_an_fp8_models_cache(tmp_path: Path) -> None:
    """They are parameters of its attention that no trainer sends."""
    program = """
import json, sys
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.radix_attention import RadixAttention
quantization, mark = json.loads(sys.argv[1])
config = Fp8Config.from_config(quantization)
attention = RadixAttention(4, 32, 0.1, num_kv_heads=2, layer_id=0, quant_config=config)
attention.quant_method.process_weights_after_loading(attention)
named = attention.named_parameters()
print(json.dumps({name: [hasattr(held, mark), held.item()] for name, held in named}))
"""
    asked = json.dumps([QUANTIZATION_CONFIG, weight_loader.CACHE_SCALE])
    environment = settings(tmp_path).environment(tmp_path / "none")
    said = subprocess.check_output([PYTHON, "-c", program, asked], env=environment, text=True)
    assert json.loads(said.splitlines()[-1]) == {"k_scale": [True, 1.0], "v_scale": [True, 1.0]}


def test_paths_do_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to(PYTHON)
    monkeypatch.chdir(tmp_path)
    relative = settings(Path("run"), python=Path("python"))
    assert (relative.directory, relative.python) == (tmp_path / "run", tmp_path / "python")


@same_on_a_cpu
def test_another_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sglang_python must be"):
        settings(tmp_path, python=tmp_path / "python")
    server = SGLangServer(
        settings(tmp_path, python=Path("/bin/false"), start_timeout=20.0),
        CONFIG,
        weights=tmp_path / "none",
    )
    with pytest.raises(ServerFailed, match="status 1"):
        server.start()


@pytest.mark.slow
def test_a_hanging_server_is_replaced(tmp_path: Path) -> None:
    engine = SGLangEngine(CONFIG, settings(tmp_path, hang_timeout=10.0))
    model = build_model(7)

    async def play() -> list[list[tuple[list[int], Completion]]]:
        conversations = asyncio.gather(
            *(converse(engine, session, temperature=1.0) for session in range(3))
        )
        await asyncio.sleep(0.05)
        for pid in supervisor.descendants(engine.server.pid):
            if "scheduler" in command_of(pid):
                os.kill(pid, signal.SIGSTOP)
        return await conversations

    try:
        with engine.awake():
            engine.load_weights(shards(model))
            engine.start()
            conversations = asyncio.run(play())
            assert engine.counts.restarts == 1
        for turns in conversations:
            for prompt, answer in turns:
                check_logprobs(model, prompt, answer, 1.0)
    finally:
        engine.shutdown()
