"""What a weight sync launches on the device, trainer and server together, counted on a fake one."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

pytest.importorskip("fake_cuda_device", reason="needs the fake CUDA device")
from ragen_mega.engines.sglang import weight_loader  # noqa: E402
from ragen_mega.engines.sglang.weights import FileBucket, IpcTransfer  # noqa: E402
from ragen_mega.rollout.engine import EngineShard  # noqa: E402
from ragen_mega.run.placement import Colocated, Phase  # noqa: E402
from tests.cuda.test_budgets import budgets  # noqa: E402
from tests.fake_cuda.counts import counted  # noqa: E402

MIB = 2**20
CONFIG = Qwen2Config(
    vocab_size=32000,
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


class InOneProcess(IpcTransfer):
    """Keeps a bucket where the loader can be called with it: a fake device has no handles."""

    def _pickle(self, bucket: FileBucket) -> bytes:
        self.bucket = bucket
        return b""


def test_a_sync_keeps_its_budget() -> None:
    transfer = InOneProcess(CONFIG, EngineShard(), torch.bfloat16)
    weights = {  # rows are alike, which is soon made
        name: torch.randn(tensor.shape[-1], dtype=tensor.dtype, device="cuda")
        .expand(tensor.shape)
        .contiguous()
        for name, tensor in transfer._expected.items()
    }
    server = nn.Module()
    held = {name: nn.Parameter(torch.zeros_like(tensor)) for name, tensor in weights.items()}
    server.named_parameters = held.items
    num_places, num_buckets = 0, 0
    weight_loader.checksum(weights["model.norm.weight"])  # its constants are there once
    allocated = torch.cuda.memory_allocated()
    with counted() as counts:
        for messages in transfer.receive(weights.items()):
            for message in messages:  # before the buffer is filled again
                weight_loader.load(server, [(str(message.file), transfer.bucket.memory)])
                report = weight_loader.report_of(message.file).read_text()
                assert json.loads(report) == {"error": None}
                num_buckets += 1
                num_places += len(transfer.bucket.places)
    transfer.close()
    del transfer.bucket
    assert torch.cuda.memory_allocated() == allocated  # no buffer stays for the rollout
    # Two buckets, the server's copy of one to be summed, and the products of a sum.
    assert counts.peak <= (2 * 128 + 128 + 256 + 1) * MIB
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())
    assert num_buckets == -(-transfer.num_bytes // (128 * MIB)) > 2
    budget = {what: number for (_, work, what), number in budgets().items() if work == "sync"}
    # Into the bucket, into the parameter, and back for the checksum.
    others = counts.operations - 3 * num_places
    most = budget["operations per sync"]
    assert others <= budget["operations per 64 MiB"] * transfer.num_bytes / (64 * MIB) + most
    assert counts.synchronizations <= budget["waits per bucket"] * num_buckets
    assert counts.to_device == budget["bytes to device"]
    assert counts.to_host <= budget["bytes to host per MiB"] * transfer.num_bytes / MIB


def test_what_torch_keeps_is_the_engines_when_it_has_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where nothing is offloaded."""
    placement, emptied = Colocated("none"), list[Phase]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(placement.phase))
    with placement.lend_device():
        assert emptied == [Phase.SYNC]
        placement.enter(Phase.ROLLOUT)
        assert emptied == [Phase.SYNC, Phase.ROLLOUT]
    assert placement.phase is Phase.TRAIN and len(emptied) == 2
