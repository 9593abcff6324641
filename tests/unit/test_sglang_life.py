"""The life of an SGLang engine against a program that answers as SGLang does and writes down what
it is asked: when it takes which memory, what is sent again, and what a lost server costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.config import LoraConfig
from ragen_mega.data.fields import ROUTES, TOKEN_FIELDS, add_routes
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.sglang import server, supervisor
from ragen_mega.engines.sglang.engine import SGLangEngine, SGLangFollower
from ragen_mega.engines.sglang.server import ServerFailed, ServerSettings
from ragen_mega.engines.sglang.weights import FileTransfer
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.ranks import collectives
from ragen_mega.rollout.engine import EngineError, EngineShard, Interrupted, WeightsLost
from tests.support.forked_ranks import on_ranks

CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SERVER = """#!{python} -I
import array, base64, json, os, pathlib, re, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    version = None
    num_aborts = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{{}}")
        path = self.path.partition("?")[0]
        if os.path.exists("slow"):
            time.sleep(0.3)
        with open("requests.jsonl", "a") as log:
            log.write(json.dumps([path, body.get("tags")]) + "\\n")
        answer, status = {{"success": True, "message": ""}}, 200
        if path == "/abort_request":
            Handler.num_aborts += 1
        if path == "/openapi.json":
            answer = {{"paths": {{}}}}
        if path == "/server_info":
            answer = {{"enable_memory_saver": "--enable-memory-saver" in sys.argv}}
        if path == "/update_weights_from_tensor":
            for message in body["serialized_named_tensors"]:
                file = re.search(rb"/[ -~]*[.]json", base64.b64decode(message))[0].decode()
                error = os.path.exists("refuse") and "no room" or None
                pathlib.Path(file).with_suffix(".report").write_text(json.dumps({{"error": error}}))
        if path == "/update_weight_version":
            Handler.version = body["new_version"]
        if path == "/generate":
            before = Handler.num_aborts
            while os.path.exists("hold") and Handler.num_aborts == before:
                time.sleep(0.01)
            is_aborted = Handler.num_aborts > before
            answer = {{"output_ids": [5], "meta_info": {{
                "finish_reason": {{"type": "abort" if is_aborted else "length"}},
                "weight_version": Handler.version,
                "output_token_logprobs": [[-0.5, 5, None]], "cached_tokens": 0}}}}
            if body.get("return_routed_experts"):
                start, end = body["routed_experts_start_len"], len(body["input_ids"])
                experts = [i % 4 for t in range(start, end) for i in (t, t + 1)]
                data = base64.b64encode(array.array("i", experts).tobytes()).decode()
                answer["meta_info"]["routed_experts"] = data
            if is_aborted and body["input_ids"] == [9]:  # as of one that is not queued yet
                answer, status = {{"error": {{"message": "Request 9 was aborted"}}}}, 400
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST

    def log_message(self, *arguments):
        pass

if sys.argv[1] == "-c":
    print("libcudart.so.13 /wheels/nvidia/lib/libcudart.so.13.0.48")
    sys.exit()
if os.path.exists("broken"):
    sys.exit("no start")
pathlib.Path("searched").write_text(os.environ.get("LD_LIBRARY_PATH", ""))
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
FREE = [("/abort_request", None), ("/flush_cache", None)]
FREE += [("/release_memory_occupation", ["kv_cache", "weights", "cuda_graph"])]
WAKE = [("/resume_memory_occupation", ["weights"])]
SEND = [("/update_weights_from_tensor", None), ("/update_weight_version", None)]
START = [("/resume_memory_occupation", ["cuda_graph", "kv_cache"])]
GENERATE = [("/generate", None)]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., SGLangEngine]]:
    engines: list[SGLangEngine] = []

    def start(
        device: Literal["cpu", "cuda"] = "cpu",
        returns_routes: bool = False,
        lora: LoraConfig | None = None,
        **options: Any,
    ) -> SGLangEngine:
        program = tmp_path / "python"
        program.write_text(SERVER.format(python=sys.executable))
        program.chmod(0o700)
        settings = ServerSettings(
            program,
            tmp_path / "server",
            max_context=16,
            max_running_requests=2,
            kv_cache_tokens=64,
            hang_timeout=60.0,
            device=device,
            returns_routes=returns_routes,
            lora=lora,
        )
        engines.append(SGLangEngine(CONFIG, settings, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


def shards() -> Iterator[tuple[str, torch.Tensor]]:
    weights = Qwen2ForCausalLM(CONFIG).state_dict()
    return cut_stream(weights.items(), CONFIG, *EngineShard())


def generate(engine: SGLangEngine) -> Completion:
    return asyncio.run(engine.generate([1, 2], SamplingParams(3), session=0))


def asked(engine: SGLangEngine) -> list[tuple[str, list[str] | None]]:
    """What changed the server, or was generated, since the last call."""
    log = engine.server.settings.directory / "requests.jsonl"
    rows = [tuple(json.loads(line)) for line in log.read_text().splitlines()]
    log.unlink()
    ours = ("/health_generate", "/server_info", "/openapi.json")
    return [row for row in rows if row[0] not in ours]


def kill(engine: SGLangEngine) -> None:
    (pid,) = supervisor.descendants(engine.server.pid)
    os.kill(pid, signal.SIGKILL)


def test_whoever_takes_the_port_of_a_server_is_sent_nothing(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of a free port and the start of the server; the key is for the server."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def listen() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = stranger.accept()
                    heard.append(connection.recv(1 << 16))

        threading.Thread(target=listen, daemon=True).start()
        monkeypatch.setattr(server, "_free_port", lambda: stranger.getsockname()[1])
        with pytest.raises(
            EngineError, match="(?s)ended with status .*ends with:.*Address already"
        ):
            build().server.start()
        stranger.shutdown(socket.SHUT_RDWR)
    assert heard == []


@pytest.mark.parametrize("transfer", ["file", "ipc"])
def test_memory_is_taken_by_statements(build: Callable[..., SGLangEngine], transfer: str) -> None:
    engine = build(transfer=transfer)
    with engine.awake():
        engine.load_weights(shards())
        engine.start()
        assert generate(engine) == Completion([5], [-0.5], "length")
    assert asked(engine) == SEND + GENERATE + FREE  # the first time the server takes all at once
    with engine.awake():
        assert asked(engine) == WAKE
        engine.load_weights(shards())
        assert asked(engine) == SEND
        with pytest.raises(RuntimeError, match="loaded and must be started"):
            generate(engine)
        for expected in (START, []):
            engine.start()
            generate(engine)
            assert asked(engine) == expected + GENERATE
        engine.pause()
        assert asked(engine) == FREE
        with pytest.raises(RuntimeError, match="awake and must be started"):
            generate(engine)
        engine.load_weights(shards(), again=True)
        assert asked(engine) == WAKE + SEND
        engine.start()
        generate(engine)
        assert asked(engine) == START + GENERATE
    assert engine.weight_version == 2 and engine.counts.restarts == 0


def test_a_server_is_asked_for_routes_from_the_first_that_is_lacking(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, ROUTES, None)  # there is none afterwards
    add_routes(1, 2, 4)
    engine = build(returns_routes=True)
    engine._shape = SimpleNamespace(
        vocab_size=64, num_layers=1, num_experts=4, experts_per_token=2
    )  # of a mixture, with the weights of a dense model
    with engine.awake():
        engine.load_weights(shards())
        engine.start()
        sampling = SamplingParams(3, num_recorded=2)
        completion = asyncio.run(engine.generate([1, 2, 3, 4], sampling, session=0))
    assert completion.prompt_fields[ROUTES].tolist() == [[[2, 3]], [[3, 0]]]
    assert completion.further_fields[ROUTES].tolist() == [[[0, 2]]]  # not known yet
    having = {*engine.server.settings.arguments(Path("model"), 1)}
    lacking = {*replace(engine.server.settings, returns_routes=False).arguments(Path("model"), 1)}
    # with the overlap SGLang 0.5.17 returns routes of a later pass
    assert having - lacking == {"--enable-return-routed-experts", "--disable-overlap-schedule"}


def num_weight_bytes() -> int:
    return sum(tensor.nbytes for _, tensor in shards())


def free_when_asleep(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    """Let the free memory of the device change by so many bytes once the server falls asleep."""
    log = engine.server.settings.directory / "requests.jsonl"

    def device_memory() -> tuple[int, int]:
        was_released = "release_memory" in log.read_text()
        return 10**9 + change * was_released, 2 * 10**9

    monkeypatch.setattr(torch.cuda, "mem_get_info", device_memory)


@pytest.mark.parametrize("frees", [True, False])
def test_a_server_that_keeps_its_memory_asleep_is_an_error(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    """As where its memory saver could not be preloaded: it answers, and nothing becomes free."""
    engine = build("cuda")
    free_when_asleep(engine, monkeypatch, num_weight_bytes() * frees)
    with contextlib.ExitStack() as stack:
        if not frees:
            stack.enter_context(pytest.raises(EngineError, match="give its memory back, .* 0 more"))
        with engine.awake():
            engine.load_weights(shards())
    if frees:  # later another program may take what the server gives back
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 2 * 10**9))
        with engine.awake():
            engine.load_weights(shards())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_server_on_a_shared_device_need_not_show_what_it_frees(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """The server of a second rank on the card starts meanwhile and takes more than that."""
    engine = build("cuda")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    free_when_asleep(engine, monkeypatch, num_weight_bytes() - 10**8)
    with contextlib.ExitStack() as stack:
        if num_ranks == 1:  # another program; a rank of the run has its device for itself
            stack.enter_context(pytest.raises(EngineError, match="does another program take"))
        with engine.awake():
            engine.load_weights(shards())


def test_a_server_that_was_started_without_its_memory_saver_may_keep_its_memory(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As tools/gpu_check.sh starts it where the memory saver cannot be preloaded."""
    engine = build("cuda")
    program, server = tmp_path / "python", tmp_path / "program"
    program.rename(server)
    drop = 'for flag; do shift; [ "$flag" = --enable-memory-saver ] || set -- "$@" "$flag"; done'
    program.write_text(f'#!/bin/sh\n{drop}\nexec {server} "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 2 * 10**9))
    for _ in range(2):
        with engine.awake():
            engine.load_weights(shards())


def test_the_loader_finds_the_cuda_runtime_for_the_memory_saver(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    server = build("cuda").server
    server.start()
    directory = server.settings.directory
    assert (directory / "searched").read_text() == f"/opt/lib:{directory}/lib"
    (link,) = (directory / "lib").iterdir()
    assert link.name == "libcudart.so.13"
    assert os.readlink(link) == "/wheels/nvidia/lib/libcudart.so.13.0.48"


@pytest.mark.parametrize(("transfer", "is_kept"), [("file", True), ("ipc", False)])
def test_what_a_lost_server_costs(
    build: Callable[..., SGLangEngine], transfer: str, is_kept: bool
) -> None:
    """With a copy of the weights nothing but time; without one they have to be sent again."""
    engine = build(transfer=transfer)
    hold = engine.server.settings.directory / "hold"

    async def lose_two_requests() -> list[Completion | BaseException]:
        hold.touch()
        asking = [engine.generate([1], SamplingParams(1), session=i) for i in range(2)]
        answers = asyncio.gather(*asking, return_exceptions=True)
        log = hold.parent / "requests.jsonl"
        while not log.exists() or len(log.read_text().splitlines()) < 2:
            await asyncio.sleep(0.01)
        kill(engine)
        hold.unlink()
        return await answers

    with engine.awake():
        engine.load_weights(shards())
        engine.start()
        asked(engine)
        if is_kept:
            assert [answer.tokens for answer in asyncio.run(lose_two_requests())] == [[5], [5]]
            assert asked(engine) == 2 * GENERATE + SEND + 2 * GENERATE
        else:
            for error in asyncio.run(lose_two_requests()):
                assert isinstance(error, WeightsLost) and "no copy of its weights is kept" in str(
                    error
                )
            engine.load_weights(shards(), again=True)
            engine.start()
            assert generate(engine).tokens == [5]
        assert engine.counts.restarts == 1 and engine.counts.reissued == 2
        assert engine.weight_version == 1


def test_a_pause_aborts_requests_and_sends_them_again(build: Callable[..., SGLangEngine]) -> None:
    """As when the engine of another rank has lost its weights, and all give them again."""
    engine = build(transfer="ipc")
    directory = engine.server.settings.directory

    def requests() -> int:
        log = directory / "requests.jsonl"
        return log.read_text().count('"/generate"') if log.exists() else 0

    async def begin() -> list[asyncio.Task[Completion]]:
        prompts = [[1], [9]]
        asking = [
            asyncio.create_task(engine.generate(prompt, SamplingParams(1), session=session))
            for session, prompt in enumerate(prompts)
        ]
        while requests() < len(prompts):
            await asyncio.sleep(0.01)
        return asking

    async def answers(asking: list[asyncio.Task[Completion]]) -> list[Completion]:
        return await asyncio.gather(*asking)

    with engine.awake(), asyncio.Runner() as runner:  # which goes on where it was, as a rollout
        engine.load_weights(shards())
        engine.start()
        asked(engine)
        (directory / "hold").touch()
        asking = runner.run(begin())
        engine.pause()
        engine.load_weights(shards(), again=True)
        engine.start()
        (directory / "hold").unlink()
        assert [answer.tokens for answer in runner.run(answers(asking))] == [[5], [5]]
        assert asked(engine) == 2 * GENERATE + FREE + WAKE + SEND + START + 2 * GENERATE
        assert (engine.counts.reissued, engine.counts.restarts) == (2, 0)
        assert engine.weight_version == 1


def test_the_others_of_a_server_do_not_wait_for_a_pause_that_fails(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, met = build(), []
    with engine.awake():
        engine.load_weights(shards())
        monkeypatch.setattr(engine, "_sleep", Mock(side_effect=EngineError("refused")))
        monkeypatch.setattr(engine._transfer, "wait_for_all_ranks", lambda: met.append("there"))
        with pytest.raises(EngineError, match="refused"):
            engine.pause()
        assert met == ["there"]
        monkeypatch.undo()


def test_a_server_that_does_not_sleep_hides_no_signal_to_stop(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint comes next, for which the memory is taken from the server."""
    engine = build()
    monkeypatch.setattr(engine, "_sleep", Mock(side_effect=EngineError("refused")))
    with pytest.raises(Interrupted), engine.awake():
        assert engine.server.is_running
        raise Interrupted
    assert not engine.server.is_running
    with pytest.raises(EngineError, match="refused"), engine.awake():
        pass


def test_what_is_aborted_without_a_pause_is_an_error(build: Callable[..., SGLangEngine]) -> None:
    engine = build()

    async def ask(prompt: list[int]) -> None:
        asking = asyncio.create_task(engine.generate(prompt, SamplingParams(1), session=0))
        log = engine.server.settings.directory / "requests.jsonl"
        while not log.exists() or "/generate" not in log.read_text():
            await asyncio.sleep(0.01)
        engine.server.client.call("POST", "/abort_request", {"abort_all": True})
        await asking

    with engine.awake():
        engine.load_weights(shards())
        engine.start()
        (engine.server.settings.directory / "hold").touch()
        for prompt, error in (([1], "gave up a request"), ([9], "Request 9 was aborted")):
            asked(engine)
            with pytest.raises(RuntimeError, match=error):
                asyncio.run(ask(prompt))


@pytest.mark.forks
def test_a_shared_server_has_memory_only_when_all_its_ranks_have_made_room(tmp_path: Path) -> None:
    """It takes memory on the devices of the others too: each has freed its own by then, and takes
    it back only when the server sleeps.
    """
    program = tmp_path / "python"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o700)
    options = dict(max_context=16, max_running_requests=2, kv_cache_tokens=64)
    settings = ServerSettings(program, tmp_path / "server", tensor_parallel_size=2, **options)

    def rank() -> None:
        collectives.start()
        group, index = collectives.consecutive_group(2), collectives.rank()
        engine: SGLangEngine | SGLangFollower = (
            SGLangFollower(CONFIG, EngineShard(1, 2), torch.float32, group=group)
            if index
            else SGLangEngine(CONFIG, settings, group=group)
        )

        def note(what: str) -> None:
            if index:  # where time is lost, and what it then does to its memory
                time.sleep(0.3 * (what == "free"))
                with (settings.directory / "requests.jsonl").open("a") as log:
                    log.write(json.dumps([what, None]) + "\n")

        def load(*, again: bool = False) -> None:
            weights = Qwen2ForCausalLM(CONFIG).state_dict()
            shards = cut_stream(weights.items(), CONFIG, *engine.shard)
            engine.load_weights(shards, again=again)
            note("free")
            engine.start()

        with engine.awake():  # it starts
            load()
        collectives.barrier()
        if not index:
            asked(engine)
            (settings.directory / "slow").touch()
        collectives.barrier()
        for error in (None, Interrupted):
            note("free")
            with contextlib.suppress(Interrupted), engine.awake():
                load()
                engine.pause()
                note("take")
                load(again=True)
                if error:
                    raise error
            note("take")
            collectives.barrier()
        if not index:
            made_room, taken = [("free", None)], [("take", None)]
            turn = SEND[:1] + made_room + START + FREE + taken
            told = [row for row in asked(engine) if row not in SEND[1:]]
            assert told == 2 * (made_room + WAKE + turn + WAKE + turn)
            engine.shutdown()

    on_ranks(rank, 2)


def test_a_server_that_is_lost_between_the_statements(
    build: Callable[..., SGLangEngine],
) -> None:
    engine = build()
    with engine.awake():
        kill(engine)
        engine.load_weights(shards())
        kill(engine)
        engine.start()
        assert generate(engine).tokens == [5]
    kill(engine)
    with engine.awake():
        engine.load_weights(shards())
        engine.start()
        assert generate(engine).tokens == [5]
    assert engine.counts.restarts == 3


def test_a_server_that_died_asleep_is_sent_the_base_of_adapters_again(
    build: Callable[..., SGLangEngine],
) -> None:
    """Its successor has random weights, beside which an adapter alone would sample."""
    engine = build(lora=LoraConfig(lora_rank=2))
    adapter = {
        f"model.layers.0.self_attn.q_proj.lora_{kind}.weight": torch.ones(size)
        for kind, size in (("A", (2, 32)), ("B", (32, 2)))
    }
    for has_base in (False, True, False):
        with engine.awake():
            assert engine.has_base == has_base
            if not has_base:
                engine.load_weights(shards())
            engine.load_adapter(adapter.items(), again=not has_base)
            engine.start()
            assert engine.has_base and generate(engine).tokens == [5]
        if has_base:
            kill(engine)
            while engine.server.is_running:  # until its supervisor has noticed
                time.sleep(0.01)
    assert engine.counts.restarts == 1


def test_the_stream_ends_also_where_the_server_fails(build: Callable[..., SGLangEngine]) -> None:
    """Other ranks take part in it."""
    engine = build(bucket_bytes=1024)
    directory = engine.server.settings.directory
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in shards():
            taken.append(name)
            yield name, tensor

    with engine.awake():
        (directory / "refuse").touch()
        with pytest.raises(EngineError, match="rank 0 .* the weights .*no room"):
            engine.load_weights(stream())
        assert len(taken) == len(dict(shards()))
        with pytest.raises(RuntimeError, match="awake and must be loaded"):
            engine.start()
        (directory / "refuse").unlink()
        (directory / "broken").touch()
        kill(engine)
        taken.clear()
        with pytest.raises(ServerFailed, match="lost 3 times"):
            engine.load_weights(stream())
        assert len(taken) == len(dict(shards()))


def full_after(num_files: int) -> Callable[[int, int, int], None]:
    """What a full /dev/shm does when that many files are in it."""
    left = iter(range(num_files))

    def allocate(descriptor: int, start: int, num_bytes: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(descriptor, num_bytes)

    return allocate


def test_full_shared_memory_is_named_and_the_stream_ends(
    build: Callable[..., SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(bucket_bytes=1024)
    weights = shards()
    num_bytes = sum(tensor.nbytes for _, tensor in shards())
    monkeypatch.setattr(os, "posix_fallocate", full_after(2))
    with engine.awake():
        named = f"/dev/shm has no room .*{num_bytes} bytes .*--shm-size.*--weight-transfer ipc"
        with pytest.raises(EngineError, match=named):
            engine.load_weights(weights)
        assert next(weights, None) is None
        monkeypatch.undo()
        engine.load_weights(shards())  # what was left there does not disturb
        engine.start()
        assert generate(engine).tokens == [5]


@pytest.mark.forks
@pytest.mark.parametrize("num_files", [0, 2])
def test_full_shared_memory_ends_all_ranks_of_a_server(num_files: int) -> None:
    def rank() -> None:
        collectives.start()
        group, index = collectives.consecutive_group(2), collectives.rank()
        transfer = FileTransfer(
            CONFIG, EngineShard(index, 2), torch.float32, group=group, bucket_bytes=1024
        )
        if index:
            os.posix_fallocate = full_after(num_files)  # in this fork
        weights = cut_stream(
            Qwen2ForCausalLM(CONFIG).state_dict().items(), CONFIG, *EngineShard(index, 2)
        )
        with pytest.raises(EngineError, match="/dev/shm has no room"):
            for _ in transfer.receive(weights):
                continue
        assert next(weights, None) is None
        collectives.barrier()
        transfer.close()

    on_ranks(rank, 2)
