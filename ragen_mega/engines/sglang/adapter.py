"""An adapter for an SGLang server, through its endpoints for adapters, with a checksum of each
tensor. Requests ask for it by its name, which no older adapter has.

Read in SGLang 0.5.17: managers/tp_worker.py, lora/lora_manager.py. Every rank of the server gets
all of it and cuts its part itself.
"""

import base64
import hashlib
import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragen_mega.config import LoraConfig
from ragen_mega.engines.sglang.http_json import JSONClient
from ragen_mega.engines.sglang.weights import post
from ragen_mega.models.lora import PREFIX
from ragen_mega.storage.adapter_files import peft_config


class ServedAdapter(NamedTuple):
    """An adapter as a server takes it."""

    name: str
    body: dict[str, Any]

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, Tensor]], lora: LoraConfig, *, version: int, size: int
    ) -> "ServedAdapter":
        """Make the request from a stream of (PEFT's name without its prefix, full tensor), for a
        server of `size` ranks.
        """
        named = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        payload = base64.b64encode(pickle.dumps(named)).decode()
        body = {
            "lora_name": f"policy-{version}",
            "config_dict": peft_config(named, lora, model=""),
            "serialized_named_tensors": [payload] * size,
            "expected_checksums": {name: _digest(tensor) for name, tensor in named.items()},
        }
        return cls(f"policy-{version}", body)

    def send(self, client: JSONClient, before: str | None, version: int) -> None:
        """Have a server take it in place of the one of the name `before`. Raises RequestRefused if
        it does not.
        """
        if before is not None:
            post(client, "/unload_lora_adapter", {"lora_name": before})
        post(client, "/load_lora_adapter_from_tensors", self.body)
        versions = {"new_version": str(version), "abort_all_requests": False}
        post(client, "/update_weight_version", versions)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
