"""An engine as a user starts it, in a fork of this process: SGLang's endpoints for weights that
come through a process group, with its order of calls and its refusals, over tensors in a
dictionary.

Read in SGLang 0.5.17: entrypoints/http_server.py, utils/common.py (`init_custom_process_group`),
model_executor/model_runner_components/weight_updater.py, weight_sync/tensor_bucket.py.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support.web_server import Request

_FORK = multiprocessing.get_context("fork")
ABOUT = {
    "version": "0.5.17", "tp_size": 1, "ep_size": 1, "dp_size": 1, "pp_size": 1,
    "dtype": "auto", "quantization": None, "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "max_req_input_len": 400, "max_total_num_tokens": 8192,
    "num_layers": 2, "hidden_size": 32,  # of the model, which SGLang does not say
    "architectures": ["Qwen2ForCausalLM"], "preferred_sampling_params": None,
}  # fmt: skip


class GivenEngine:
    """One engine of one rank. `folder` has the file `asked`, with a line for every call; the engine
    does a thing once that a file there asks for: `die` or `hang` in the next bucket, `refuse` it.
    """

    def __init__(self, folder: Path, **about: Any) -> None:
        self.folder, self.about = folder, ABOUT | about
        folder.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it anew, at the same address, without weights."""
        self.process = _FORK.Process(target=self._serve, daemon=True)
        self.process.start()

    def wish(self, what: str) -> None:
        (self.folder / what).touch()

    def wake(self) -> None:
        """Let it go on after `hang`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()

    def asked(self) -> list[str]:
        """What changed the engine since the last call."""
        log = self.folder / "asked"
        lines = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def held(self) -> dict[str, str]:
        """Name -> digest of the weights that it holds."""
        return json.loads((self.folder / "held").read_text())

    def _serve(self) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        state: dict[str, Any] = {"groups": {}, "version": "default", "held": {}}
        folder, about = self.folder, self.about

        def takes(what: str) -> bool:
            wished = (folder / what).exists()
            (folder / what).unlink(missing_ok=True)
            return wished

        def is_unknown(name: str) -> bool:
            parts = name.split(".")
            return parts[1] == "layers" and int(parts[2]) >= about["num_layers"]

        def join(body: dict[str, Any]) -> None:
            address = f"tcp://{body['master_address']}:{body['master_port']}"
            size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
            store, rank, size = next(dist.rendezvous(address, rank, size))
            group, _ = c10d._new_process_group_helper(
                size, rank, [], dist.Backend(body["backend"]), dist.PrefixStore(name, store),
                group_name=name, timeout=c10d.default_pg_timeout,
            )  # fmt: skip
            c10d._world.pg_group_ranks[group] = {index: index for index in range(size)}
            state["groups"][name] = group

        def update(body: dict[str, Any]) -> None:
            if body["group_name"] not in state["groups"]:
                raise ValueError(f"Group {body['group_name']} not in {[*state['groups']]}")
            is_asking = len(body["names"]) == 1  # about the model, before any bucket
            if not is_asking and takes("die"):
                os._exit(1)
            if not is_asking and takes("hang"):
                os.kill(os.getpid(), signal.SIGSTOP)
            empty = [
                torch.empty(shape, dtype=getattr(torch, dtype))
                for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
            ]
            flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in empty])
            dist.broadcast(flat, src=0, group=state["groups"][body["group_name"]])
            for name, shape in zip(body["names"], body["shapes"], strict=True):
                if is_unknown(name):
                    return
                if name.endswith("norm.weight") and shape != [about["hidden_size"]]:
                    raise ValueError(f"Failed to update parameter online: {name} has another size")
            if takes("refuse"):
                raise ValueError("Failed to update parameter online: the sizes differ")
            parts = flat.split([tensor.nbytes for tensor in empty])
            for name, part in zip(body["names"], parts, strict=True):
                state["held"][name] = hashlib.sha256(part.numpy().tobytes()).hexdigest()
            (folder / "held").write_text(json.dumps(state["held"]))

        def leave(body: dict[str, Any]) -> None:
            dist.destroy_process_group(state["groups"].pop(body["group_name"]))

        def generate(body: dict[str, Any]) -> dict[str, Any]:
            return {"output_ids": [5], "meta_info": {
                "finish_reason": {"type": "length"}, "weight_version": state["version"],
                "output_token_logprobs": [[-0.5, 5, None]], "cached_tokens": 0}}  # fmt: skip

        paths = {
            "/init_weights_update_group": join,
            "/update_weights_from_distributed": update,
            "/destroy_weights_update_group": leave,
            "/update_weight_version": lambda body: state.update(version=body["new_version"]),
            "/generate": generate,
            "/server_info": lambda body: about,
            "/model_info": lambda body: about,
            "/openapi.json": lambda body: {"paths": {}},
            "/abort_request": lambda body: None,
            "/flush_cache": lambda body: None,
            "/health_generate": lambda body: None,
        }

        handler = handler_of(paths, folder / "asked")
        ThreadingHTTPServer.allow_reuse_address = True
        ThreadingHTTPServer(("127.0.0.1", self.port), handler).serve_forever()


@contextmanager
def given_engine(folder: Path, **about: Any) -> Iterator[GivenEngine]:
    """Give an engine for the block, once it listens."""
    engine = GivenEngine(folder, **about)
    try:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", engine.port), timeout=1.0).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield engine
    finally:
        engine.stop()


def handler_of(paths: Mapping[str, Callable[[dict[str, Any]], Any]], asked: Path) -> type[Request]:
    """HTTP around functions, which takes down in a file what changed the engine."""

    class Call(Request):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            if path not in ("/server_info", "/model_info", "/openapi.json"):
                with asked.open("a") as log:
                    log.write(f"{path}\n")
            status, answer = 200, {"success": True, "message": ""}
            try:
                answer = paths[path](json.loads(self.body or b"{}")) or answer
            except (RuntimeError, ValueError, KeyError, OSError) as error:  # as SGLang does
                status, answer = 400, {"success": False, "message": str(error)}
            self.reply(answer, status)

        do_GET = Request.do_POST

    return Call
