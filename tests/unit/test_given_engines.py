"""Engines that the user has started: how weights get to them through a process group, what a lost,
a hanging and a refusing one costs, and which are refused before training.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config

from ragen_mega.config import parse
from ragen_mega.data.types import Completion, SamplingParams
from ragen_mega.engines.sglang import given
from ragen_mega.engines.sglang.engine import SGLangEngine
from ragen_mega.engines.sglang.given import connect
from ragen_mega.engines.sglang.http_json import ConnectionLost, RequestRefused
from ragen_mega.engines.sglang.server import ServerFailed, ServerSettings
from ragen_mega.rollout.engine import WeightsLost
from tests.support.given_engine import GivenEngine, given_engine
from tests.support.processes import wait_until
from tests.support.sockets import all_listening, is_loopback

pytestmark = pytest.mark.forks
ROOT = Path(__file__).parents[2]
CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
TAKE, LABEL = "/update_weights_from_distributed", "/update_weight_version"
FREE = ["/abort_request", "/flush_cache"]
PATIENCE = 100.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(CONFIG).state_dict()


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """As the engine names them: a tied LM head is the embedding."""
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in state.items()
        if name != "lm_head.weight"
    }


def settings(directory: Path, address: str, **changes: Any) -> ServerSettings:
    values = {"max_context": 16, "max_running_requests": 2, "kv_cache_tokens": 64}
    values |= {"start_timeout": 20.0, "hang_timeout": PATIENCE, "address": address}
    return ServerSettings(Path("no python"), directory, **(values | changes))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[GivenEngine]:
    with given_engine(tmp_path / "engine") as engine:
        yield engine


@pytest.fixture
def client(engine: GivenEngine, tmp_path: Path) -> Iterator[SGLangEngine]:
    client = SGLangEngine(CONFIG, settings(tmp_path, engine.address), bucket_bytes=16 * 1024)
    yield client
    client.shutdown()


def load(client: SGLangEngine, seed: int, *, again: bool = False) -> dict[str, str]:
    state = weights(seed)
    client.load_weights(state.items(), again=again)
    return digests(state)


def generate(client: SGLangEngine) -> Completion:
    return asyncio.run(client.generate([1, 2], SamplingParams(3), session=0))


def test_weights_arrive_to_the_bit_by_the_calls_that_sglang_wants(
    engine: GivenEngine, client: SGLangEngine
) -> None:
    with all_listening(psutil.Process()) as addresses:
        for seed in range(2):
            with client.awake():
                assert engine.asked() == []
                assert load(client, seed) == engine.held()
                asked = engine.asked()
                num_buckets = asked.count(TAKE)
                assert asked == [JOIN] * (seed == 0) + [TAKE] * num_buckets + [LABEL]
                assert num_buckets > 2
                client.start()
                assert generate(client) == Completion([5], [-0.5], "length")
                assert engine.asked() == ["/generate"]
            # it keeps its memory, and is not ended
            assert engine.asked() == FREE
    assert addresses and all(map(is_loopback, addresses)), addresses
    client.shutdown()
    assert engine.process.is_alive() and engine.asked() == []


def test_an_engine_that_dies_in_a_bucket_is_awaited(
    engine: GivenEngine, client: SGLangEngine
) -> None:
    """Its callers find no weights; they come again, and through another group."""
    with client.awake():
        load(client, 0)
        client.start()
        engine.wish("die")
        load(client, 1)  # its connection has ended, which is seen at once
        client.start()
        with pytest.raises(WeightsLost, match="no copy of its weights is kept"):
            generate(client)
        engine.process.join()
        engine.asked()
        engine.start()
        assert load(client, 1, again=True) == engine.held()
        client.start()
        assert generate(client).tokens == [5]
    asked = engine.asked()
    assert asked.count(JOIN) == 1 and asked[-3:] == ["/generate", *FREE]
    assert client.counts.restarts == 1 and client.weight_version == 2


@pytest.mark.slow
def test_an_engine_that_hangs_in_a_bucket_ends_the_group_and_not_the_run(
    engine: GivenEngine, client: SGLangEngine
) -> None:
    with client.awake():
        load(client, 0)
        engine.wish("hang")
        client._transfer._patience = 10.0
        load(client, 1)
        client._transfer._patience = PATIENCE
        client.start()
        with pytest.raises(WeightsLost, match="not done within 10 s.* no copy of its weights"):
            generate(client)
        engine.wake()
        assert load(client, 1, again=True) == engine.held()
        client.start()
        assert generate(client).tokens == [5]


ALONE = """
import sys
from pathlib import Path
from tests.unit.test_given_engines import CONFIG, SGLangEngine, load, settings
client = SGLangEngine(CONFIG, settings(Path(sys.argv[1]), sys.argv[2]))
with client.awake():
    load(client, 0)
"""


def test_a_run_that_is_killed_in_a_bucket_leaves_an_engine_for_the_next(
    engine: GivenEngine, tmp_path: Path
) -> None:
    """Though the engine stands still while the sender's connection ends."""
    engine.wish("hang")
    # neither forked from this process's threads nor spawned with the paths that pytest adds
    command = [sys.executable, "-c", ALONE, str(tmp_path / "killed"), engine.address]
    sender = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: psutil.Process(engine.process.pid).status() == psutil.STATUS_STOPPED)
    sender.kill()
    sender.wait()
    engine.wake()
    client = SGLangEngine(CONFIG, settings(tmp_path / "next", engine.address))
    with client.awake():
        assert load(client, 1) == engine.held()
        client.start()
        assert generate(client).tokens == [5]
    client.shutdown()


def test_a_refused_bucket_is_said_at_once(engine: GivenEngine, client: SGLangEngine) -> None:
    """Without waiting for what the engine will never take, and the stream goes to its end."""
    with client.awake():
        engine.wish("refuse")
        stream = iter(weights(0).items())
        with pytest.raises(RequestRefused, match="the sizes differ"):
            client.load_weights(stream)
        assert next(stream, None) is None
        assert LEAVE in engine.asked()
        assert load(client, 1) == engine.held()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"num_layers": 1}, "the model that --load names: it has fewer layers than the 2 of"),
        ({"num_layers": 3}, "it has more layers than the 2 of the model"),
        ({"hidden_size": 48}, "does not take the weights of .*another size"),
    ],
)
def test_a_model_of_other_sizes_is_refused_in_one_line(
    about: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with given_engine(tmp_path / "engine", **about) as engine:
        client = SGLangEngine(CONFIG, settings(tmp_path, engine.address))
        with client.awake(), pytest.raises(RequestRefused, match=said) as caught:
            client.load_weights(weights(0).items())
        assert "\n" not in str(caught.value) and engine.address in str(caught.value)
        client.shutdown()


def test_an_engine_that_does_not_come_back_ends_the_run_in_one_line(
    engine: GivenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SGLangEngine(CONFIG, settings(tmp_path, engine.address, start_timeout=0.5))
    with client.awake():
        load(client, 0)
        engine.stop()
        client.server.stop()
        with pytest.raises(ServerFailed, match="lost 3 times") as caught:
            client.load_weights(weights(0).items(), again=True)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("about", "changes", "said"),
    [
        ({"version": "0.5.9"}, {}, "runs SGLang 0.5.9, and the run needs 0.5.17 or newer"),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, "architectures .*Qwen3.*set --load to"),
        ({"tp_size": 2}, {}, "tp_size 2, and the run needs 1; .*--rollout-tensor-parallel-size"),
        ({}, {"tensor_parallel_size": 2}, "tp_size 1, and the run needs 2"),
        ({"dp_size": 2}, {}, "dp_size 2"),
        ({"dtype": "bfloat16"}, {}, "dtype bfloat16, and the run needs float32; .*--bf16"),
        ({"pp_size": 2}, {}, "pp_size 2"),
        ({"quantization": "fp8"}, {}, "quantization fp8"),
        ({"preferred_sampling_params": {"top_k": 5}}, {}, "preferred_sampling_params"),
        (
            {"disable_overlap_schedule": False},
            {"returns_routes": True},
            "disable_overlap_schedule False, .* True; .*--routing-replay policy",
        ),
        ({}, {"max_context": 4000, "kv_cache_tokens": 5000}, "takes 400 tokens.*context-length"),
    ],
)
def test_engines_that_do_not_fit_are_refused(
    about: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with given_engine(tmp_path / "engine", **about) as engine:
        with pytest.raises(ValueError, match=said) as caught:
            connect(settings(tmp_path, engine.address, **changes), CONFIG)
        assert "\n" not in str(caught.value) and engine.address in str(caught.value)


@pytest.mark.parametrize(
    ("about", "changes"),
    [
        ({"disable_overlap_schedule": True}, {"returns_routes": True}),
        ({"version": "0.5.18", "disable_overlap_schedule": False}, {"returns_routes": True}),
        ({"disable_overlap_schedule": False}, {}),
    ],
    ids=["no overlap", "later version", "no routes"],
)
def test_engines_whose_routes_no_later_pass_overwrites(
    about: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    with given_engine(tmp_path / "engine", **about) as engine:
        connect(settings(tmp_path, engine.address, **changes), CONFIG)


def test_the_key_comes_from_the_environment_and_another_model_is_told(
    engine: GivenEngine, tmp_path: Path
) -> None:
    other = Qwen3Config(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    connect(settings(tmp_path, engine.address), CONFIG)
    with pytest.raises(ValueError, match="Qwen2.*needs .*Qwen3"):
        connect(settings(tmp_path, engine.address), other)


def answering(data: bytes) -> Callable[[], str]:
    """A listener that says the same to everybody, or nothing, and keeps no connection."""
    data = data.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")

    def listen() -> str:
        server = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                connection.recv(1 << 16)
                if data:
                    connection.sendall(data)
                    connection.close()
                else:
                    silent.append(connection)

        silent: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    return listen


@pytest.mark.parametrize(
    ("listen", "kind", "said"),
    [
        (lambda: "127.0.0.1:9", ConnectionLost, "gives no answer.*correct --engine-addresses"),
        (answering(b""), ConnectionLost, "gives no answer within 1 s"),
        (answering(b"SSH-2.0-OpenSSH_9.6\r\n"), ConnectionLost, "gives no answer"),
        (
            answering(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno"),
            ValueError,
            "refuses .*401.*RAGEN_ENGINE_AUTHORIZATION",
        ),
        (
            answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"),
            ValueError,
            "refuses .*404.*is it SGLang's",
        ),
        (
            answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"),
            ValueError,
            "answers /server_info as SGLang does not",
        ),
        (
            answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
            ValueError,
            "runs SGLang None",
        ),
    ],
    ids=["nobody", "silence", "ssh", "key", "path", "text", "empty"],
)
def test_what_is_no_engine_is_said_in_one_line(
    listen: Callable[[], str],
    kind: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given, "_SECONDS_TO_ANSWER", 1.0)
    with pytest.raises(kind, match=said) as caught:
        connect(settings(tmp_path, listen()), CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [("Bearer hidden\r\n", "refuses .*401"), ("Bearer hidden\u00e9", "must hold one line")],
)
def test_a_key_that_no_header_can_hold_is_not_repeated(
    value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(given.AUTHORIZATION, value)
    listen = answering(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno")
    with pytest.raises(ValueError, match=said) as caught:
        connect(settings(tmp_path, listen()), CONFIG)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--engine-addresses a:1", "engine_addresses does nothing"),
        ("--rollout-engine sglang --engine-addresses http://a:1", "must be HOST:PORT"),
        ("--rollout-engine sglang --engine-addresses a", "must be HOST:PORT"),
        ("--rollout-engine sglang --engine-addresses a:1,a:1", "names an engine twice"),
        ("--rollout-engine sglang --engine-addresses a:1 --rollout-fp8", "drop --rollout-fp8"),
        (
            "--rollout-engine sglang --engine-addresses a:1 --weight-transfer ipc",
            "weight_transfer is for servers of the run",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(["--environments", "bandit", *flags.split()])


def test_ranks_share_engines_in_their_order() -> None:
    flags = "--environments bandit --rollout-engine sglang --engine-addresses a:1,[::1]:2"
    config = parse(flags.split())
    assert config.rollout.given_engines == ("a:1", "[::1]:2")
    assert config.rollout.num_engines(4, 2) == 2 and config.at_trainers == config
    with pytest.raises(ValueError, match="names 2 engines, which must divide the 3 ranks"):
        config.rollout.num_engines(3, 3)
    apart = parse([*flags.split(), "--placement", "separate", "--rollout-ranks", "2"])
    assert apart.at_trainers.rollout.given_engines == ()
