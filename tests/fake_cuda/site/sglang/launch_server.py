"""A server with SGLang's command line, HTTP API and manners, as far as ragen_mega relies on them,
over a transformers model on the fake CUDA device: `python -m sglang.launch_server`.

Read in SGLang 0.5.17: entrypoints/http_server.py, managers/scheduler_components/weight_updater.py,
utils/common.py (SafeUnpickler), layers/linear.py. tests/integration/test_sglang_engine.py holds it
and the real server to the same answers. As the real one it dies of what its scheduler asserts. It
has one rank and answers one request at a time.
"""

import argparse
import base64
import ctypes
import importlib
import io
import json
import math
import os
import pickle
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from transformers import AutoConfig, AutoModelForCausalLM

SWITCHES = """
    skip-tokenizer-init skip-server-warmup sleep-on-idle enable-memory-saver disable-cuda-graph
    disable-prefill-cuda-graph enable-deterministic-inference
""".split()
VALUES = """
    model-path load-format host port device dtype tp-size ep-size context-length max-total-tokens
    max-running-requests grammar-backend random-seed log-level custom-weight-loader sampling-backend
    attention-backend moe-runner-backend base-gpu-id config mem-fraction-static
""".split()
BLOCK = 128
"""Rows and columns that share a scale of FP8."""
VOCAB_PADDING = 64
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameter of the server -> parameters of transformers, one below the other."""
KINDS = ("kv_cache", "weights", "cuda_graph")
ALLOWED = ("builtins.", "collections.", "torch.", "multiprocessing.")


class Unpickler(pickle.Unpickler):
    """Takes what the real server's takes."""

    def find_class(self, module: str, name: str) -> Any:
        if not f"{module}.{name}".startswith(ALLOWED):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


def die(why: str) -> None:
    """End as the server does when its scheduler raises."""
    print(f"Scheduler hit an exception: {why}", flush=True)
    os._exit(1)


class Model(nn.Module):
    """A transformers model under the server's names: `named_parameters` are what weights are loaded
    into, and the model computes with their views.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = AutoConfig.from_pretrained(directory)
        is_fp8 = "quantization_config" in json.loads((directory / "config.json").read_text())
        if is_fp8:
            del self.config.quantization_config
        with device:
            self.inner = AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval()
        self.held: dict[str, nn.Parameter] = {}
        self.quantized: dict[str, list[nn.Parameter]] = {}  # name -> what is computed with
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.inner.named_parameters():
            groups.setdefault(self._fused(name), []).append(parameter)
        for name, parts in groups.items():
            self._hold(name, parts, is_fp8 and ".layers." in name and parts[0].dim() == 2)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        """By the server's names."""
        yield from self.held.items()

    def _fused(self, name: str) -> str:
        for fused, parts in PARTS.items():
            for part in parts:
                name = name.replace(f".{part}.", f".{fused}.")
        return name

    def _hold(self, name: str, parts: list[nn.Parameter], in_fp8: bool) -> None:
        """Allocate one parameter of the server."""
        rows = sum(len(part) for part in parts)
        if "embed_tokens" in name or "lm_head" in name:
            rows = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
        shape, like = (rows, *parts[0].shape[1:]), parts[0].data
        if in_fp8:
            values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)
            blocks = [math.ceil(size / BLOCK) for size in shape]
            self.quantized[name] = parts
            self.held[name] = nn.Parameter(values, requires_grad=False)
            self.held[f"{name}_scale_inv"] = nn.Parameter(
                torch.empty(blocks, device=like.device), requires_grad=False
            )
            return
        whole = self.held[name] = nn.Parameter(like.new_empty(shape), requires_grad=False)
        start = 0
        for part in parts:
            part.data = whole.data[start : start + len(part)]
            start += len(part)

    def dequantize(self) -> None:
        """Compute with the weights in FP8 that were loaded."""
        for name, parts in self.quantized.items():
            scales = self.held[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0)
            rows, columns = self.held[name].shape
            scales = scales.repeat_interleave(BLOCK, 1)[:rows, :columns]
            whole = (self.held[name].float() * scales).to(parts[0].dtype)
            for part, values in zip(parts, whole.split([len(part) for part in parts])):
                part.data = values

    @torch.no_grad()
    def sample(self, tokens: list[int], sampling: dict[str, Any], generator: Any) -> dict[str, Any]:
        """The answer to /generate but for its meta data."""
        entries, stop, stopped = [], set(sampling.get("stop_token_ids") or ()), False
        inputs, cache = torch.tensor([tokens]), None
        while len(entries) < sampling["max_new_tokens"] and not stopped:
            output = self.inner(inputs.cuda(), past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[0, -1].float().cpu()
            temperature = sampling["temperature"] or 1.0
            logprobs = (logits / temperature).log_softmax(-1)
            ordered, ids = logprobs.exp().sort(descending=True)
            outside = ordered.cumsum(0) - ordered >= sampling.get("top_p", 1.0)
            place = 0
            if sampling["temperature"]:
                place = int(ordered.masked_fill(outside, 0.0).multinomial(1, generator=generator))
            token = int(ids[place])
            entries.append([float(logprobs[token]), token, None])
            stopped, inputs = token in stop, torch.tensor([[token]])
        reason = {"type": "stop", "matched": entries[-1][1]} if stopped else {"type": "length"}
        return {
            "output_ids": [entry[1] for entry in entries],
            "meta_info": {"finish_reason": reason, "output_token_logprobs": entries},
        }


class Server:
    """What the endpoints do; `paths` are theirs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.enable_memory_saver:
            ctypes.CDLL("libcudart.so.13")  # as the library that is preloaded does
        self.arguments = arguments
        self.device = torch.device(arguments.device, arguments.base_gpu_id)
        torch.cuda.set_device(self.device)
        dtype = getattr(torch, arguments.dtype)
        self.model = Model(Path(arguments.model_path), dtype, self.device)
        config = self.model.config
        width = config.num_key_value_heads * self.model.inner.model.layers[0].self_attn.head_dim
        size = (2 * config.num_hidden_layers * arguments.max_total_tokens, width)
        self.kv_cache = torch.empty(size, dtype=dtype, device=self.device)
        self.released: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        """Kind -> its memory, and how many bytes it had."""
        self.running = 0
        self.version = "default"
        self.seen: list[list[int]] = []
        self.generator = torch.Generator().manual_seed(arguments.random_seed)
        self.one_at_a_time = threading.Lock()
        self.groups: dict[str, tuple[dist.ProcessGroup, str]] = {}
        self.paths = {
            "/health_generate": self.health_generate,
            "/server_info": self.server_info,
            "/openapi.json": lambda: {"paths": dict.fromkeys(self.paths)},
            "/generate": self.generate,
            "/flush_cache": self.flush_cache,
            "/abort_request": lambda **_: None,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
            "/update_weights_from_tensor": self.update_weights_from_tensor,
            "/update_weight_version": self.update_weight_version,
            "/model_info": self.model_info,
            "/init_weights_update_group": self.init_weights_update_group,
            "/update_weights_from_distributed": self.update_weights_from_distributed,
            "/destroy_weights_update_group": self.destroy_weights_update_group,
        }

    def _memory(self, kind: str) -> list[Tensor]:
        """What the memory saver manages."""
        if not self.arguments.enable_memory_saver:
            return []
        if kind == "weights":
            return [parameter.data for parameter in self.model.held.values()]
        return [self.kv_cache] if kind == "kv_cache" else []

    def health_generate(self) -> None:
        """Generates one token."""
        self.generate([1], {"max_new_tokens": 1, "temperature": 0.0})

    def server_info(self) -> dict[str, Any]:
        return {
            "max_total_num_tokens": self.arguments.max_total_tokens,
            "enable_memory_saver": self.arguments.enable_memory_saver,
            "max_req_input_len": int(self.arguments.context_length),
            "version": "0.5.17",
            "dtype": self.arguments.dtype,
            **dict.fromkeys(("tp_size", "ep_size", "dp_size", "pp_size"), 1),
            **dict.fromkeys(("quantization", "speculative_algorithm")),
            "disaggregation_mode": "null",
        }

    def model_info(self) -> dict[str, Any]:
        architectures = self.model.config.architectures
        return {"architectures": architectures, "preferred_sampling_params": None}

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int,
        group_name: str, backend: str,
    ) -> dict[str, Any]:  # fmt: skip
        """Join the sender, which is rank 0."""
        place = f"tcp://{master_address}:{master_port}"
        store, rank, size = next(dist.rendezvous(place, rank_offset, world_size))
        group, _ = c10d._new_process_group_helper(
            size, rank, [], dist.Backend(backend), dist.PrefixStore(group_name, store),
            group_name=group_name, timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
        self.groups[group_name] = group, backend
        return {"success": True, "message": ""}

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str,
        load_format: str, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Take a bucket of full tensors by the names of transformers."""
        if load_format != "flattened_bucket":
            raise ValueError(f"Unknown load_format={load_format}")
        group, backend = self.groups[group_name]
        device = self.device if backend == "nccl" else torch.device("cpu")
        kinds = [getattr(torch, name) for name in dtypes]
        sizes = [math.prod(s) * kind.itemsize for s, kind in zip(shapes, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=0, group=group)
        named = dict(self.model.inner.named_parameters())
        with torch.no_grad():
            for name, shape, kind, part in zip(names, shapes, kinds, flat.split(sizes)):
                if named[name].shape != tuple(shape):
                    raise ValueError(f"Failed to update parameter online: size of {name}")
                named[name].copy_(part.view(kind).view(shape))
        torch.cuda.synchronize()
        return {"success": True, "message": "Succeeded to update parameter online."}

    def destroy_weights_update_group(self, group_name: str) -> dict[str, Any]:
        """Leave a group."""
        group, _ = self.groups.pop(group_name)
        dist.destroy_process_group(group)
        return {"success": True, "message": ""}

    def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], return_logprob: bool = True
    ) -> dict[str, Any]:
        """Sample under the weights that were loaded last."""
        if self.released:
            die(f"{', '.join(self.released)} are released, and a request is to run")
        self.running += 1
        with self.one_at_a_time:
            answer = self.model.sample(input_ids, sampling_params, self.generator)
            shared = max(map(lambda other: common(input_ids, other), self.seen), default=0)
            self.seen.append(input_ids + answer["output_ids"])
        self.running -= 1
        answer["meta_info"] |= {
            "weight_version": self.version,
            "prompt_tokens": len(input_ids),
            "cached_tokens": min(shared, len(input_ids) - 1),
        }
        return answer

    def flush_cache(self) -> str:
        """Waits for what runs, as with a long timeout."""
        while self.running:
            time.sleep(0.01)
        self.seen.clear()
        return "Cache flushed.\n"

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """The memory saver unmaps the memory; what it held is lost."""
        if self.running:
            die("release_memory_occupation should be called only when server is idle.")
        for kind in tags or KINDS:
            if kind in self.released:
                die(f"memory saver: {kind} is paused already")
            storages = [tensor.untyped_storage() for tensor in self._memory(kind)]
            self.released[kind] = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)
        torch.cuda.synchronize()

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        for kind in tags or KINDS:
            if kind not in self.released:
                die(f"{kind} was not released")
            for storage, num_bytes in self.released.pop(kind):
                storage.resize_(num_bytes)

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, **_: Any
    ) -> dict[str, Any]:
        """Call the custom weight loader with what this rank was sent."""
        if load_format != self.arguments.custom_weight_loader:
            raise ValueError(f"Unknown load_format={load_format}")
        (payload,) = serialized_named_tensors
        tensors = Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        module, _, name = load_format.rpartition(".")
        tensors = [(key, tensor.to(self.device)) for key, tensor in tensors]
        getattr(importlib.import_module(module), name)(self.model, tensors)
        torch.cuda.synchronize()
        return {"success": True, "message": "Success"}

    def update_weight_version(self, new_version: str, **_: Any) -> dict[str, Any]:
        self.version = new_version
        self.model.dequantize()
        return {"success": True, "new_version": new_version}


def common(left: list[int], right: list[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for count, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return count
    return min(len(left), len(right))


def handler_of(server: Server, key: str) -> type[BaseHTTPRequestHandler]:
    """HTTP around the server's methods."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            if key and self.headers["Authorization"] != f"Bearer {key}":
                self.answer(401, {"error": "Unauthorized"})
            elif path not in server.paths:
                self.answer(404, {"detail": "Not Found"})
            else:
                self.answer(*self.work(path, json.loads(content or b"{}")))

        do_GET = do_POST

        def work(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            """Status and answer; what is not a refusal ends the scheduler."""
            answer = None
            try:
                answer = 200, server.paths[path](**body)
            except ValueError as error:
                answer = 400, {"success": False, "message": str(error)}
            finally:
                if answer is None:
                    traceback.print_exc()
                    die(path)
            return answer

        def answer(self, status: int, body: Any) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; what the real server does not know is an error."""
    parser = argparse.ArgumentParser(prog="sglang", allow_abbrev=False)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    numbers = ("port", "base-gpu-id", "max-total-tokens", "random-seed", "tp-size", "ep-size")
    for name in VALUES:
        parser.add_argument(f"--{name}", type=int if name in numbers else str, default=0)
    parser.set_defaults(tp_size=1, ep_size=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    if arguments.tp_size != 1:
        sys.exit("this stand-in has one rank")
    file = Path(arguments.config) if arguments.config else None
    secret = file.read_text().partition("api-key: ")[2].strip() if file else ""
    handler = handler_of(Server(arguments), secret)
    # as many connections as the real server lets wait; Python's five are lost on a busy machine
    ThreadingHTTPServer.request_queue_size = 2048
    ThreadingHTTPServer((arguments.host, arguments.port), handler).serve_forever()
