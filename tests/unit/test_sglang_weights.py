"""Buckets of weights: what is in the files, their size, and what is refused."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.engines.http_json import JSONClient, RequestRefused
from ragen_mega.engines.sglang_weights import WeightSender, WeightStore

CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=True,
)
BUCKET = 16 * 1024
LARGEST = 64 * 32 * 4


@pytest.fixture
def store() -> Iterator[WeightStore]:
    store = WeightStore(CONFIG, bucket_bytes=BUCKET, dtype=torch.float32)
    yield store
    store.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(Qwen2ForCausalLM(CONFIG).state_dict())


def read(buckets: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for folder in buckets:
        tensors = load_file(folder / "model.safetensors")
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def test_buckets_hold_the_stream_and_stay_small(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    shared = torch.empty(10_000)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():  # all through one buffer, as a gather does it
            yield name, shared[: tensor.numel()].view(tensor.shape).copy_(tensor)

    buckets = list(store.receive(stream()))
    assert store.buckets == buckets and len(buckets) > 2
    found = read(buckets)
    assert found.keys() == weights.keys() - {"lm_head.weight"}
    assert all(torch.equal(found[name], weights[name]) for name in found)
    for folder in buckets:
        assert sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values()) <= max(BUCKET, LARGEST)
    assert stat.S_IMODE(buckets[0].parent.stat().st_mode) == 0o700


def test_a_bucket_is_there_before_the_next_tensor_is_asked_for(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    asked = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal asked
        for item in weights.items():
            asked += 1
            yield item

    next(store.receive(stream()))
    assert asked < len(weights) / 2


def test_the_old_weights_go_when_new_ones_come(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    list(store.receive(weights.items()))
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    list(store.receive(changed.items()))
    assert torch.equal(read(store.buckets)["model.norm.weight"], changed["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}, "did not arrive, e.g. 'model.norm.weight'"),
        (lambda w: w | {"wte": torch.zeros(1)}, "unexpected weight 'wte'"),
        (lambda w: w | {"model.norm.weight": torch.zeros(16)}, r"full shape \(32,\), not \(16,\)"),
    ],
)
def test_what_is_refused(store: WeightStore, weights: dict[str, torch.Tensor], change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(store.receive(change(weights).items()))
    assert store.buckets == []


def test_a_name_twice_is_refused(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="arrived twice"):
        list(store.receive([*weights.items(), next(iter(weights.items()))]))


def test_close_gives_the_memory_back(weights: dict[str, torch.Tensor]) -> None:
    store = WeightStore(CONFIG, bucket_bytes=BUCKET, dtype=torch.float32)
    folder = next(store.receive(weights.items())).parent
    store.close()
    store.close()
    assert not folder.exists()


class Generation:
    """The rules of one generation of SGLang's HTTP API, which the real servers state: sessions, and refusals."""

    def __init__(self, *, has_sessions: bool) -> None:
        self.paths = ["/update_weights_from_disk", "/update_weight_version"]
        self.paths += ["/begin_weight_update", "/end_weight_update"] if has_sessions else []
        self.in_session = not has_sessions
        self.asked: list[str] = []
        self.refuse_with: int | None = None

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        if path == "/openapi.json":
            return 200, {"paths": dict.fromkeys(self.paths)}
        self.asked.append(path)
        if path not in self.paths:
            return 404, {"detail": "Not Found"}
        if path == "/begin_weight_update":
            self.in_session = True
        if path == "/update_weights_from_disk":
            if not self.in_session:
                return 400, {"success": False, "message": "not between begin_weight_update and end_weight_update"}
            if self.refuse_with:
                return self.refuse_with, {"success": False, "message": "Failed to update weights"}
        if path == "/end_weight_update":
            self.in_session = False
        return 200, {"success": True, "message": ""}


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = []

    def start(generation: Generation) -> JSONClient:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = generation.answer(self.path)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *arguments: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return JSONClient(servers[-1].server_port, "key")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("has_sessions", [False, True])
def test_both_generations_of_the_api(serve: Any, has_sessions: bool) -> None:
    generation = Generation(has_sessions=has_sessions)
    sender = WeightSender(serve(generation), timeout=10)
    sender.send([Path("0"), Path("1")], 3)
    updates = ["/update_weights_from_disk"] * 2
    session = ["/begin_weight_update", *updates, "/end_weight_update"] if has_sessions else updates
    assert sender.has_update_session == has_sessions
    assert generation.asked == [*session, "/update_weight_version"]


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_says_no_is_an_error_whatever_its_status(serve: Any, status: int) -> None:
    generation = Generation(has_sessions=False)
    generation.refuse_with = status
    sender = WeightSender(serve(generation), timeout=10)
    with pytest.raises(RequestRefused, match="Failed to update weights"):
        sender.send([Path("0"), Path("1")], 3)
    assert generation.asked == ["/update_weights_from_disk"]
