"""Buckets of weights: what is in the files, their size, and what is refused."""

from __future__ import annotations

import base64
import json
import math
import pickle
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen_mega.engines.sglang import weight_loader
from ragen_mega.engines.sglang.fp8_blocks import quantize_stream
from ragen_mega.engines.sglang.http_json import JSONClient, RequestRefused
from ragen_mega.engines.sglang.weights import (
    BucketMessage,
    FileTransfer,
    IpcTransfer,
    WeightTransfer,
    send,
)
from ragen_mega.models.server_cut import cut_stream
from ragen_mega.rollout.engine import EngineShard
from tests.support.web_server import Request, serving

CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
BUCKET = 16 * 1024
WHOLE = EngineShard()


@pytest.fixture
def transfer() -> Iterator[FileTransfer]:
    transfer = FileTransfer(CONFIG, WHOLE, torch.float32, bucket_bytes=BUCKET)
    yield transfer
    transfer.close()


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(cut_stream(Qwen2ForCausalLM(CONFIG).state_dict().items(), CONFIG, *WHOLE))


def read(buckets: list[list[BucketMessage]], rank: int = 0) -> dict[str, torch.Tensor]:
    """The weights of all buckets by their descriptions, in plain Python."""
    found: dict[str, torch.Tensor] = {}
    for messages in buckets:
        file = messages[rank].file
        content = weight_loader.bytes_of(file).read_bytes()
        for name, (offset, dtype, shape, start, count) in json.loads(file.read_text())["places"]:
            assert dtype == "float32"
            values = found.setdefault(name, torch.full((math.prod(shape),), math.nan).view(shape))
            part = torch.frombuffer(
                bytearray(content[offset : offset + 4 * count]), dtype=torch.float32
            )
            assert values.view(-1)[start : start + count].isnan().all()
            values.view(-1)[start : start + count] = part
    return found


def test_buckets_hold_the_stream_and_stay_small(
    transfer: FileTransfer, weights: dict[str, torch.Tensor]
) -> None:
    shared = torch.empty(10_000)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():  # all through one buffer, as a gather does it
            yield name, shared[: tensor.numel()].view(tensor.shape).copy_(tensor)

    list(transfer.receive(stream()))
    found = read(transfer.again())
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
    *full, last = (weight_loader.bytes_of(file) for ((file, *_),) in transfer.again())
    assert len(full) > 2 and {file.stat().st_size for file in full} == {BUCKET}
    assert 0 < last.stat().st_size < BUCKET
    assert [message.is_last for (message,) in transfer.again()] == [False] * len(full) + [True]
    assert stat.S_IMODE(transfer.directory.stat().st_mode) == 0o700


def test_a_bucket_is_written_before_the_next_tensor_is_asked_for(
    transfer: FileTransfer, weights: dict[str, torch.Tensor]
) -> None:
    num_files = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights.items():
            num_files.append(len(list(transfer.directory.glob("*/*.json"))))
            yield item

    list(transfer.receive(stream()))
    assert num_files == sorted(num_files) and 0 < num_files[len(weights) // 2] < num_files[-1]


def test_the_old_weights_go_when_new_ones_come(
    transfer: FileTransfer, weights: dict[str, torch.Tensor]
) -> None:
    list(transfer.receive(weights.items()))
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    list(transfer.receive(changed.items()))
    assert torch.equal(read(transfer.again())["model.norm.weight"], changed["model.norm.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {k: v for k, v in w.items() if k != "model.norm.weight"},
            "missing: model.norm.weight",
        ),
        (lambda w: w | {"wte": torch.zeros(1)}, "'wte' came with shape"),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(16)},
            r"shape \[16\], .* \[32\]",
        ),
    ],
)
def test_what_is_refused(
    transfer: FileTransfer, weights: dict[str, torch.Tensor], change: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        list(transfer.receive(change(weights).items()))
    assert transfer.again() == []


def test_a_name_twice_is_refused(transfer: FileTransfer, weights: dict[str, torch.Tensor]) -> None:
    first = next(iter(weights.items()))
    with pytest.raises(ValueError, match="its 16 weights once"):
        list(transfer.receive([*weights.items(), first]))
    with pytest.raises(ValueError, match="its 16 weights once"):
        list(transfer.receive([("model.norm.weight", weights["model.norm.weight"])] * 2))


def test_close_gives_the_memory_back(weights: dict[str, torch.Tensor]) -> None:
    transfer = FileTransfer(CONFIG, WHOLE, torch.float32, bucket_bytes=BUCKET)
    list(transfer.receive(weights.items()))
    assert transfer.directory.exists()
    transfer.close()
    transfer.close()
    assert not transfer.directory.exists()


class Holder(nn.Module):
    """A model with the parameters of SGLang's, by their names."""

    def __init__(self, shapes: dict[str, torch.Size], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.held = {
            name: nn.Parameter(torch.full(shape, math.nan, dtype=dtype))
            for name, shape in shapes.items()
        }

    def named_parameters(
        self, *arguments: object, **options: object
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.held.items()


def reports_of_loading(transfer: FileTransfer, model: nn.Module) -> list[str | None]:
    """What the loader says of each file."""
    files = [message.file for (message,) in transfer.again()]
    weight_loader.load(model, [(str(file), torch.empty(0)) for file in files])
    return [json.loads(weight_loader.report_of(file).read_text())["error"] for file in files]


def test_the_loader_fills_every_parameter(
    transfer: FileTransfer, weights: dict[str, torch.Tensor]
) -> None:
    list(transfer.receive(weights.items()))
    model = Holder({name: tensor.shape for name, tensor in weights.items()})
    assert set(reports_of_loading(transfer, model)) == {None}
    assert all(torch.equal(model.held[name], tensor) for name, tensor in weights.items())


def test_the_loader_reports_what_it_cannot_take(
    transfer: FileTransfer, weights: dict[str, torch.Tensor]
) -> None:
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    list(transfer.receive(weights.items()))
    for changed, message in (
        (
            shapes | {"model.norm.weight": torch.Size([16])},
            "model.norm.weight as [16] torch.float32",
        ),
        (shapes | {"model.extra": torch.Size([3])}, "missing: model.extra"),
        (
            {name: shape for name, shape in shapes.items() if name != "model.norm.weight"},
            "has no model.norm.weight",
        ),
    ):
        errors = [error for error in reports_of_loading(transfer, Holder(changed)) if error]
        assert len(errors) == 1 and message in errors[0], errors


def test_a_flipped_bit_is_noticed(transfer: FileTransfer, weights: dict[str, torch.Tensor]) -> None:
    list(transfer.receive(weights.items()))
    file = weight_loader.bytes_of(transfer.again()[-1][0].file)
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    errors = reports_of_loading(
        transfer, Holder({name: tensor.shape for name, tensor in weights.items()})
    )
    assert errors[:-1] == [None] * (len(errors) - 1) and "the bits that were sent" in errors[-1]


def test_two_shared_buffers_are_filled_in_turns(weights: dict[str, torch.Tensor]) -> None:
    """As the server sees it: handles of buffers, which hold a bucket until the next but one is
    asked for.
    """
    transfer = IpcTransfer(CONFIG, WHOLE, torch.bfloat16, bucket_bytes=BUCKET // 2)
    model = Holder({name: tensor.shape for name, tensor in weights.items()}, torch.bfloat16)
    late, handles = list[BucketMessage](), []

    def load(message: BucketMessage) -> None:
        named_tensors = pickle.loads(base64.b64decode(message.payload))
        assert [name for name, _ in named_tensors] == [str(message.file)]
        weight_loader.load(model, named_tensors)
        assert json.loads(weight_loader.report_of(message.file).read_text()) == {"error": None}
        handles.append(named_tensors[0][1].data_ptr())

    for messages in transfer.receive(weights.items()):
        for message in late:  # at the last moment
            load(message)
        late = messages
    assert late == [] and len(handles) > 4
    assert all(torch.equal(model.held[name], tensor.bfloat16()) for name, tensor in weights.items())
    assert transfer.again() is None
    transfer.close()


def test_a_buffer_that_changes_too_early_is_noticed(weights: dict[str, torch.Tensor]) -> None:
    transfer = IpcTransfer(CONFIG, WHOLE, torch.float32, bucket_bytes=BUCKET)
    messages = transfer.receive(weights.items())
    ((file, payload, _),) = next(messages)
    late = pickle.loads(base64.b64decode(payload))
    next(messages)
    next(messages)
    weight_loader.load(Holder({name: tensor.shape for name, tensor in weights.items()}), late)
    report = weight_loader.report_of(file).read_text()
    assert "all of a bucket that has changed" in report
    transfer.close()


@pytest.mark.parametrize("kind", [FileTransfer, IpcTransfer])
def test_linear_weights_in_fp8(
    kind: type[WeightTransfer], weights: dict[str, torch.Tensor]
) -> None:
    transfer = kind(CONFIG, WHOLE, torch.bfloat16, fp8=True, bucket_bytes=BUCKET)
    expected = {
        name: tensor if tensor.dtype.itemsize == 1 or "scale" in name else tensor.bfloat16()
        for name, tensor in quantize_stream(weights.items(), CONFIG)
    }
    model = Holder({})
    model.held = {
        name: nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
        for name, tensor in expected.items()
    }
    scales = [nn.Parameter(torch.tensor(math.nan), requires_grad=False) for _ in range(2)]
    for name, scale in zip("kv", scales):  # as SGLang's attention has them after a sleep
        scale._skip_weight_check = True
        model.held[f"model.layers.0.self_attn.attn.{name}_scale"] = scale
    for messages in transfer.receive(weights.items()):
        for file, payload, _ in messages:
            weight_loader.load(model, pickle.loads(base64.b64decode(payload)))
            assert json.loads(weight_loader.report_of(file).read_text()) == {"error": None}
    transfer.close()
    assert [scale.item() for scale in scales] == [1.0, 1.0]
    dtypes = Counter(str(tensor.dtype) for tensor in expected.values())
    assert dtypes == {
        "torch.float8_e4m3fn": 8,
        "torch.float32": 8,
        "torch.bfloat16": len(weights) - 8,
    }
    for name, tensor in expected.items():
        assert torch.equal(model.held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_no_file_no_exception(tmp_path: Path) -> None:
    """An exception would end the server."""
    weight_loader.load(Holder({}), [(str(tmp_path / "0.json"), torch.empty(0))])
    assert "FileNotFoundError" in (tmp_path / "0.report").read_text()


class Generation:
    """The rules of one generation of SGLang's HTTP API, which the real servers state: sessions, and
    refusals.
    """

    def __init__(self, buckets: list[list[BucketMessage]], *, has_sessions: bool) -> None:
        self.reports = iter([weight_loader.report_of(message.file) for (message,) in buckets])
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
                return 400, {
                    "success": False,
                    "message": "not between begin_weight_update and end_weight_update",
                }
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
    servers = ExitStack()

    def start(generation: Generation) -> JSONClient:
        class Call(Request):
            def answer(self) -> None:
                status, body = generation.answer(self.path)
                self.reply(body, status)

            do_GET = Request.do_POST

        return JSONClient(servers.enter_context(serving(Call)), "Bearer key")

    with servers:
        yield start


@pytest.fixture
def buckets(transfer: FileTransfer, weights: dict[str, torch.Tensor]) -> list[list[BucketMessage]]:
    """Two, with the report of an earlier loading, which does not count."""
    list(transfer.receive(weights.items()))
    for (message,) in transfer.again():
        weight_loader.report_of(message.file).write_text('{"error": null}')
    return transfer.again()[:2]


def test_a_bucket_is_filled_while_the_server_takes_another(
    serve: Any, transfer: FileTransfer, weights: dict[str, torch.Tensor]
) -> None:
    """This server takes the first bucket when the second one is there, and never else; the third,
    which is filled where the first was, has to wait for it.
    """
    list(transfer.receive(weights.items()))
    generation = Generation(transfer.again(), has_sessions=False)
    second, third = (transfer.again()[index][0].file for index in (1, 2))
    answer, overtaken = generation.answer, list[bool]()

    def hesitate(path: str) -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + 60
        while path == "/update_weights_from_tensor" and not second.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if path == "/update_weights_from_tensor" and not overtaken:
            time.sleep(0.2)  # for a sender that does not wait
            overtaken.append(third.exists())
        return answer(path)

    generation.answer = hesitate
    send(serve(generation), transfer.receive(weights.items()), 1)
    assert generation.asked.count("/update_weights_from_tensor") == len(transfer.again())
    assert overtaken == [False]


@pytest.mark.parametrize("has_sessions", [False, True])
def test_both_generations_of_the_api(
    serve: Any, buckets: list[list[BucketMessage]], has_sessions: bool
) -> None:
    generation = Generation(buckets, has_sessions=has_sessions)
    send(serve(generation), buckets, 3)
    updates = ["/update_weights_from_tensor"] * 2
    session = ["/begin_weight_update", *updates, "/end_weight_update"] if has_sessions else updates
    assert generation.asked == [*session, "/update_weight_version"]


@pytest.mark.parametrize("has_sessions", [False, True])
@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_says_no_is_an_error_whatever_its_status(
    serve: Any, buckets: list[list[BucketMessage]], status: int, has_sessions: bool
) -> None:
    generation = Generation(buckets, has_sessions=has_sessions)
    generation.refuse_with = status
    with pytest.raises(RequestRefused, match="Failed to update weights"):
        send(serve(generation), buckets, 3)
    session = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    assert generation.asked == (session if has_sessions else session[1:2])


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (None, "did not read its weights"),
        ("no room", "rank 0 of the SGLang server .*no room"),
    ],
)
def test_a_server_that_says_yes_is_not_believed(
    serve: Any, buckets: list[list[BucketMessage]], report: str | None, message: str
) -> None:
    generation = Generation(buckets, has_sessions=False)
    generation.report = report
    with pytest.raises(RequestRefused, match=message):
        send(serve(generation), buckets, 3)
