"""Buckets of weights: what is in the files, their size, and what is refused."""

from __future__ import annotations

import json
import math
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.engines import weight_loader
from ragen_mega.engines.engine_shards import cut_stream
from ragen_mega.engines.http_json import JSONClient, RequestRefused
from ragen_mega.engines.sglang_weights import WeightSender, WeightStore
from ragen_mega.rollout.engine import EngineShard

CONFIG = Qwen2Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=True,
)
BUCKET = 16 * 1024
LARGEST = 64 * 32 * 4


WHOLE = EngineShard()


@pytest.fixture
def store() -> Iterator[WeightStore]:
    store = WeightStore(CONFIG, WHOLE, torch.float32, bucket_bytes=BUCKET)
    yield store
    store.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(cut_stream(Qwen2ForCausalLM(CONFIG).state_dict().items(), CONFIG, *WHOLE))


def read(buckets: list[list[Path]], rank: int = 0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for files in buckets:
        tensors = load_file(files[rank])
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def test_buckets_hold_the_stream_and_stay_small(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    shared = torch.empty(10_000)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():  # all through one buffer, as a gather does it
            yield name, shared[: tensor.numel()].view(tensor.shape).copy_(tensor)

    store.receive(stream())
    assert len(store.buckets()) > 2
    found = read(store.buckets())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in found)
    for (file,) in store.buckets():
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= max(BUCKET, LARGEST)
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


def test_a_bucket_is_written_before_the_next_tensor_is_asked_for(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    num_files = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights.items():
            num_files.append(len(list(store.directory.glob("*/*"))))
            yield item

    store.receive(stream())
    assert num_files == sorted(num_files) and 0 < num_files[len(weights) // 2] < num_files[-1]


def test_the_old_weights_go_when_new_ones_come(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    store.receive(weights.items())
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    store.receive(changed.items())
    assert torch.equal(read(store.buckets())["model.norm.weight"], changed["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"}, "missing: model.norm.weight"),
        (lambda w: w | {"wte": torch.zeros(1)}, "unknown: wte"),
        (lambda w: w | {"model.norm.weight": torch.zeros(16)}, r"shape \(32,\), and came with \(16,\)"),
    ],
)
def test_what_is_refused(store: WeightStore, weights: dict[str, torch.Tensor], change: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store.receive(change(weights).items())
    assert store.buckets() == []


def test_a_name_twice_is_refused(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    first = next(iter(weights.items()))
    with pytest.raises(ValueError, match="sent twice: model.embed_tokens.weight"):
        store.receive([*weights.items(), first])
    with pytest.raises(ValueError, match="must arrive once"):
        store.receive([("model.norm.weight", weights["model.norm.weight"])] * 2)


def test_close_gives_the_memory_back(weights: dict[str, torch.Tensor]) -> None:
    store = WeightStore(CONFIG, WHOLE, torch.float32, bucket_bytes=BUCKET)
    store.receive(weights.items())
    assert store.directory.exists()
    store.close()
    store.close()
    assert not store.directory.exists()


class Holder(nn.Module):
    """A model with the parameters of SGLang's, by their names."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(torch.full(shape, math.nan)) for name, shape in shapes.items()}

    def named_parameters(self, *arguments: object, **options: object) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.held.items()


def reports_of_loading(store: WeightStore, model: nn.Module) -> list[str | None]:
    """What the loader says of each file."""
    files = [file for (file,) in store.buckets()]
    weight_loader.load(model, [(str(file), torch.empty(0)) for file in files])
    return [json.loads(weight_loader.report_of(file).read_text())["error"] for file in files]


def test_the_loader_fills_every_parameter(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    store.receive(weights.items())
    model = Holder({name: tensor.shape for name, tensor in weights.items()})
    assert set(reports_of_loading(store, model)) == {None}
    assert all(torch.equal(model.held[name], tensor) for name, tensor in weights.items())


def test_the_loader_reports_what_it_cannot_take(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    store.receive(weights.items())
    for changed, message in (
        (shapes | {"model.norm.weight": torch.Size([16])}, "SGLang holds model.norm.weight as [16] torch.float32 and got [32]"),
        (shapes | {"model.extra": torch.Size([3])}, "missing: model.extra"),
        ({name: shape for name, shape in shapes.items() if name != "model.norm.weight"}, "has no model.norm.weight"),
    ):
        errors = [error for error in reports_of_loading(store, Holder(changed)) if error]
        assert len(errors) == 1 and message in errors[0], errors


def test_a_flipped_bit_is_noticed(store: WeightStore, weights: dict[str, torch.Tensor]) -> None:
    store.receive(weights.items())
    file = store.buckets()[-1][0]
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    errors = reports_of_loading(store, Holder({name: tensor.shape for name, tensor in weights.items()}))
    assert errors[:-1] == [None] * (len(errors) - 1) and "must hold the bits that were sent" in errors[-1]


def test_no_file_no_exception(tmp_path: Path) -> None:
    """An exception would end the server."""
    weight_loader.load(Holder({}), [(str(tmp_path / "0.safetensors"), torch.empty(0))])
    assert "FileNotFoundError" in (tmp_path / "0.report").read_text()


class Generation:
    """The rules of one generation of SGLang's HTTP API, which the real servers state: sessions, and refusals."""

    def __init__(self, buckets: list[list[Path]], *, has_sessions: bool) -> None:
        self.reports = iter([weight_loader.report_of(file) for (file,) in buckets])
        self.report: str | None = "taken"
        self.paths = ["/update_weights_from_tensor", "/update_weight_version"]
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
        if path == "/update_weights_from_tensor":
            if not self.in_session:
                return 400, {"success": False, "message": "not between begin_weight_update and end_weight_update"}
            if self.refuse_with:
                return self.refuse_with, {"success": False, "message": "Failed to update weights"}
            if self.report is not None:
                error = None if self.report == "taken" else self.report
                next(self.reports).write_text(json.dumps({"error": error}))
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


@pytest.fixture
def buckets(store: WeightStore, weights: dict[str, torch.Tensor]) -> list[list[Path]]:
    """Two, with the report of an earlier loading, which does not count."""
    store.receive(weights.items())
    for (file,) in store.buckets():
        weight_loader.report_of(file).write_text('{"error": null}')
    return store.buckets()[:2]


@pytest.mark.parametrize("has_sessions", [False, True])
def test_both_generations_of_the_api(serve: Any, buckets: list[list[Path]], has_sessions: bool) -> None:
    generation = Generation(buckets, has_sessions=has_sessions)
    sender = WeightSender(serve(generation), "package.load", timeout=10)
    sender.send(buckets, 3)
    updates = ["/update_weights_from_tensor"] * 2
    session = ["/begin_weight_update", *updates, "/end_weight_update"] if has_sessions else updates
    assert sender.has_update_session == has_sessions
    assert generation.asked == [*session, "/update_weight_version"]


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_says_no_is_an_error_whatever_its_status(serve: Any, buckets: list[list[Path]], status: int) -> None:
    generation = Generation(buckets, has_sessions=False)
    generation.refuse_with = status
    sender = WeightSender(serve(generation), "package.load", timeout=10)
    with pytest.raises(RequestRefused, match="Failed to update weights"):
        sender.send(buckets, 3)
    assert generation.asked == ["/update_weights_from_tensor"]


@pytest.mark.parametrize(
    ("report", "message"), [(None, "did not read its weights"), ("no room", "rank 0 of the SGLang server did not take .*no room")]
)
def test_a_server_that_says_yes_is_not_believed(serve: Any, buckets: list[list[Path]], report: str | None, message: str) -> None:
    generation = Generation(buckets, has_sessions=False)
    generation.report = report
    with pytest.raises(RequestRefused, match=message):
        WeightSender(serve(generation), "package.load", timeout=10).send(buckets, 3)
