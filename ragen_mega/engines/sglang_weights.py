"""Weights for an SGLang server, in buckets through shared memory: the one way that works between any two environments.

A bucket is a folder with one safetensors file which the server reads by itself. Folders of the current weights stay, so that
a server that has died can be given all of them again without the trainer.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from ragen_mega.engines.http_json import JSONClient, RequestRefused

SHARED_MEMORY = Path("/dev/shm")
_OPTIONAL = "lm_head.weight"
"""Of a tied model, which has it under the embedding's name as well."""


class WeightStore:
    """The current weights as files in memory: as large as the model, and private to this user."""

    def __init__(self, model_config: PretrainedConfig, *, bucket_bytes: int, dtype: torch.dtype) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model_config)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._is_tied = model_config.tie_word_embeddings
        base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        self.directory = base / f"ragen-weights-{secrets.token_hex(8)}"
        """Private to this user; there from the first stream to `close`."""
        self.buckets: list[Path] = []
        """Folders of the current weights; none before the first complete stream."""

    def receive(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
        """Write a stream, bucket after bucket; they are the current weights when the last one has been taken.

        Raises ValueError unless exactly the expected names and shapes arrive.
        """
        self.clear()
        self.directory.mkdir(mode=0o700, exist_ok=True)
        written: list[Path] = []
        pending: dict[str, Tensor] = {}
        num_bytes, seen = 0, set[str]()
        for name, tensor in weights:
            self._check(name, tensor, seen)
            seen.add(name)
            if self._is_tied and name == _OPTIONAL:
                continue
            size = tensor.numel() * self._dtype.itemsize
            if pending and num_bytes + size > self._bucket_bytes:
                written.append(self._write(len(written), pending))
                yield written[-1]
                pending, num_bytes = {}, 0
            # A copy, because the stream may use its buffer again.
            pending[name] = tensor.detach().to(device="cpu", dtype=self._dtype, copy=True).contiguous()
            num_bytes += size
        missing = self._shapes.keys() - seen - ({_OPTIONAL} if self._is_tied else set())
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self._shapes)} weights did not arrive, e.g. {min(missing)!r}; "
                "every name must be exported by one rank"
            )
        if pending:
            written.append(self._write(len(written), pending))
            yield written[-1]
        self.buckets = written

    def clear(self) -> None:
        """Forget the current weights."""
        self.buckets = []
        for folder in self.directory.glob("*"):
            shutil.rmtree(folder)

    def close(self) -> None:
        """Give the memory back, for good. Safe to call again."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _check(self, name: str, tensor: Tensor, seen: set[str]) -> None:
        if name not in self._shapes:
            raise ValueError(
                f"unexpected weight {name!r}; the model has {len(self._shapes)} names, e.g. {min(self._shapes)!r}; "
                "check that the weights belong to the model config"
            )
        if name in seen:
            raise ValueError(f"weight {name!r} arrived twice; each name must be exported by one rank only")
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"weight {name!r} must have the full shape {self._shapes[name]}, not {tuple(tensor.shape)}; "
                "gather tensor-parallel shards before export"
            )

    def _write(self, index: int, tensors: dict[str, Tensor]) -> Path:
        folder = self.directory / f"{index:05d}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder


class WeightSender:
    """Tells a server to take buckets, in the manner of its generation."""

    def __init__(self, client: JSONClient, *, timeout: float) -> None:
        self._client = client
        self._timeout = timeout
        paths = client.call("GET", "/openapi.json", timeout=timeout)["paths"]
        self.has_update_session = {"/begin_weight_update", "/end_weight_update"} <= paths.keys()
        """SGLang 0.5.21 and later take weights between these two requests only; earlier ones have neither."""

    def send(self, buckets: Iterable[Path], version: int) -> None:
        """One full set of weights. Raises RequestRefused when the server does not take a bucket."""
        if self.has_update_session:
            self._post("/begin_weight_update", {})
        for folder in buckets:
            # Requests of callers that were cancelled may still run; nobody waits for them.
            body = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": True, "abort_all_requests": True}
            self._post("/update_weights_from_disk", body)
        if self.has_update_session:
            self._post("/end_weight_update", {})
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _post(self, path: str, body: dict[str, object]) -> None:
        answer = self._client.call("POST", path, body, timeout=self._timeout)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestRefused(f"{path}: {answer.get('message')}")
