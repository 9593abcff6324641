"""The SGLang server as a subprocess: with its own interpreter and environment; it ends with this
process.

Nothing of SGLang is imported here, so that trainer and server may live in different virtual
environments.
"""

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
from transformers import PretrainedConfig

from ragen_mega.config import LoraConfig
from ragen_mega.data import checksums
from ragen_mega.engines.sglang import supervisor, weight_loader
from ragen_mega.engines.sglang.fp8_blocks import QUANTIZATION_CONFIG
from ragen_mega.engines.sglang.http_json import HOST, ConnectionLost, JSONClient, RequestRefused
from ragen_mega.models.families import find_family
from ragen_mega.ranks.launcher import GLOO_INTERFACE, NCCL_INTERFACE, loopback
from ragen_mega.rollout.engine import EngineError

SPARE_CONTEXT = 8
"""SGLang refuses requests within some tokens of its context length."""
_Option = str | int | float | bool | Path | tuple[str, ...]
_LOG_TAIL_LINES = 30
_POLL_SECONDS = 0.2
_INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "CC",
    "CXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "TRITON_LIBCUDA_PATH",
    "TRITON_PTXAS_PATH",
)
_INHERITED_PREFIXES = ("LC_", "XDG_", "SGLANG_", "NCCL_", "TVM_FFI_", "TRITON_CACHE", "FLASHINFER_")


_RELIED_ON = (
    "model_path",
    "load_format",
    "skip_tokenizer_init",
    "host",
    "port",
    "device",
    "dtype",
    "quantization",
    "tp_size",
    "ep_size",
    "moe_dp_size",
    "moe_runner_backend",
    "moe_a2a_backend",
    "enable_eplb",
    "ep_num_redundant_experts",
    "init_expert_location",
    "dp_size",
    "pp_size",
    "base_gpu_id",
    "context_length",
    "max_total_tokens",
    "custom_weight_loader",
    "enable_memory_saver",
    "api_key",
    "config",
)
"""The server's names of the arguments that only the trainer may choose."""
_PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang")
ServerArgs.add_cli_args(parser)
ours, with_theirs, relied_on = json.loads(sys.argv[1])
one, other = (vars(parser.parse_args(line)) for line in (ours, with_theirs))
print(json.dumps([name for name in relied_on if one.get(name) != other.get(name)]))
"""
_FIND_CUDA_RUNTIME = """
import torch
maps = [line.split(None, 5)[5] for line in open("/proc/self/maps") if "/libcudart.so" in line]
for file in set(maps):
    print("libcudart.so." + torch.version.cuda.partition(".")[0], file.strip())
"""


class ServerFailed(EngineError):
    """The server does not run; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server. Raises ValueError for those with which it could not start or serve."""

    python: Path
    """Interpreter of an environment that has SGLang; it need not be the trainer's."""
    directory: Path
    """Private folder for configuration and log; created if it is not there. It may be on storage
    that nodes share.
    """
    max_context: int
    """Most tokens in a trajectory."""
    max_running_requests: int
    kv_cache_tokens: int
    """Tokens that the key-value cache holds, for running requests and earlier turns."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Ranks that share the experts of a layer, 1 or all."""
    fp8: bool = False
    """Linear layers compute in FP8 with block scales, for which SGLang needs a GPU."""
    deterministic: bool = False
    """Samples depend on their seed alone; SGLang has this for its GPU attention backends only."""
    returns_routes: bool = False
    """Answers say which experts the tokens of a mixture went through, on GPUs only."""
    address: str | None = None
    """HOST:PORT of a server that the user has started, and that is only asked."""
    lora: LoraConfig | None = None
    """Adapters that stand beside the weights, loaded by `load_adapter`."""
    random_seed: int = 0
    start_timeout: float = 300.0
    hang_timeout: float = 60.0
    """Seconds within which an idle server must generate one token for the health check."""
    options: Mapping[str, _Option] = field(default_factory=dict)
    """Further server arguments by their long names without leading dashes; True for a switch. They
    override those above.
    """
    command_line: Sequence[str] = ()
    """Further arguments as on the server's command line, which override all others; see
    `check_command_line`.
    """

    def __post_init__(self) -> None:
        # Absolute, because the server works in another folder; not resolved, because a venv's
        # Python is a link.
        object.__setattr__(self, "python", Path(os.path.abspath(self.python)))
        object.__setattr__(self, "directory", Path(os.path.abspath(self.directory)))
        if self.address is None and not os.access(self.python, os.X_OK):
            raise ValueError(
                f"sglang_python must be the Python of an environment with SGLang, and {self.python}"
                " cannot be executed; build one with tools/setup_sglang_cpu.sh of a clone or the"
                " h100 extra and name its bin/python"
            )
        if self.kv_cache_tokens < self.max_context + SPARE_CONTEXT:
            raise ValueError(
                f"kv_cache_tokens ({self.kv_cache_tokens}) must hold one trajectory of max_context"
                f" ({self.max_context}) and {SPARE_CONTEXT} more; raise it"
            )
        for name, is_on in (
            ("rollout_deterministic", self.deterministic),
            ("rollout_fp8", self.fp8),
        ):
            if is_on and self.device == "cpu":
                raise ValueError(
                    f"{name} needs kernels that SGLang has for GPUs only; leave it off on a CPU"
                )

    def is_healthy(self, client: JSONClient) -> bool:
        """Return whether the server of `client` generates a token in time."""
        try:
            client.call("GET", "/health_generate", timeout=self.hang_timeout + 5)
        except (ConnectionLost, RequestRefused):
            return False
        return True

    def arguments(self, model: Path, port: int) -> list[str]:
        """Return the server's command line. Weights are random until the first update."""
        on_cpu = self.device == "cpu"
        arguments: dict[str, _Option] = {
            "model-path": model,
            "load-format": "dummy",
            "skip-tokenizer-init": True,
            "skip-server-warmup": True,
            "host": HOST,
            "port": port,
            "device": self.device,
            "dtype": self.dtype,
            "tp-size": self.tensor_parallel_size,
            "ep-size": self.expert_parallel_size,
            "moe-runner-backend": "triton",  # others transpose or permute the experts they load
            "context-length": self.max_context + SPARE_CONTEXT,
            "max-total-tokens": self.kv_cache_tokens,
            "max-running-requests": self.max_running_requests,
            "grammar-backend": "none",
            "random-seed": self.random_seed,
            "log-level": "warning",
            "sleep-on-idle": True,  # else its scheduler spins on a core that the trainer needs
            "custom-weight-loader": weight_loader.LOADER,
            "sampling-backend": "pytorch",
            "enable-memory-saver": not on_cpu,
            "disable-cuda-graph": on_cpu,
            "enable-deterministic-inference": self.deterministic,
            "enable-return-routed-experts": self.returns_routes,
            # before 0.5.18 the next forward pass may overwrite routes before they are copied
            "disable-overlap-schedule": self.returns_routes,
            **({"attention-backend": "torch_native"} if on_cpu else {}),
            **({} if self.lora is None else self._lora_arguments(self.lora, on_cpu=on_cpu)),
            **self.options,
        }
        command = []
        for name, value in arguments.items():
            if value is not False:
                values = value if isinstance(value, tuple) else (value,)
                command += [f"--{name}", *map(str, () if value is True else values)]
        return [*command, *self.command_line]

    @staticmethod
    def _lora_arguments(lora: LoraConfig, *, on_cpu: bool) -> dict[str, _Option]:
        """Return the arguments of a server with one adapter, and a next one that replaces it."""
        modules = {
            "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "mlp": ("gate_proj", "up_proj", "down_proj"),
            "experts": ("gate_proj", "up_proj", "down_proj"),
        }
        named = sorted({name for target in lora.targets for name in modules[target]})
        return {
            "enable-lora": True,
            "max-lora-rank": lora.rank,
            "lora-target-modules": tuple(named),
            "max-loras-per-batch": 2,  # and none, which the health check asks for
            "lora-backend": "torch_native" if on_cpu else "triton",
        }

    @property
    def has_memory_saver(self) -> bool:
        """Whether a server that sleeps can give memory back."""
        if self.address is not None:  # it has other devices than the trainer
            return False
        return self.device == "cuda" and bool(self.options.get("enable-memory-saver", True))

    def check_command_line(self) -> None:
        """Raise ValueError unless the server's own parser takes `command_line`, and it changes
        nothing that the trainer relies on.
        """
        command = self.arguments(Path("model"), 1)
        ours = command[: len(command) - len(self.command_line)]
        answer = self._ask(_PARSE, json.dumps([ours, command, _RELIED_ON]))
        said = (answer.stderr.strip().splitlines() or [""])[-1]
        if answer.returncode:
            raise ValueError(f"SGLang does not take --sglang-arguments {self._given}: {said}")
        if changed := json.loads(answer.stdout.splitlines()[-1]):
            raise ValueError(
                f"--sglang-arguments {self._given} must not change {', '.join(changed)}, on which"
                " the trainer relies; drop it, or use a flag of the trainer"
            )

    @property
    def _given(self) -> str:
        return repr(shlex.join(self.command_line))

    def _ask(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the server's interpreter."""
        return subprocess.run(
            [self.python, "-c", program, *arguments],
            capture_output=True,
            text=True,
            env=self.environment(Path("none")),
            cwd=self.python.parent,  # nothing is to be imported from the current folder
            check=False,
        )

    def link_cuda_runtime(self) -> None:
        """Fill the folder `lib` with the CUDA runtime that torch uses in the server's environment.

        The memory saver is preloaded and needs this runtime, which the loader does not find inside
        torch's wheels. The folder is empty where torch brings no CUDA runtime.
        """
        folder = self.directory / "lib"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            for line in self._ask(_FIND_CUDA_RUNTIME).stdout.splitlines():
                name, _, file = line.partition(" ")
                (folder / name).symlink_to(file)

    def environment(self, rendezvous: Path) -> dict[str, str]:
        """Return the server's environment variables: of the trainer's only what every program
        needs, no secrets, nothing of torchrun, no paths.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        }
        kept |= {
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "SGLANG_HEALTH_CHECK_TIMEOUT": str(round(self.hang_timeout)),
            # A file instead of a TCP store, which would listen on every interface.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{rendezvous}",
            GLOO_INTERFACE: loopback(),
            NCCL_INTERFACE: loopback(),
            # The trainer holds a part of the same GPU.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        }
        if self.device == "cpu":
            kept |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        else:
            searched = [kept.get("LD_LIBRARY_PATH"), str(self.directory / "lib")]
            kept["LD_LIBRARY_PATH"] = ":".join(filter(None, searched))
        if self.device == "cpu" and self.tensor_parallel_size > 1:
            # Otherwise SGLang asks for one NUMA node per rank.
            cores = sorted(os.sched_getaffinity(0))
            bound = [str(cores[rank % len(cores)]) for rank in range(self.tensor_parallel_size)]
            kept["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        return kept


class SGLangServer:
    """One server process, from `start` to `stop`; a restart takes another port and key."""

    def __init__(
        self, settings: ServerSettings, model_config: PretrainedConfig, *, weights: Path
    ) -> None:
        """`weights` is the folder of its weights, on this node, which is removed when this process
        is killed; key and rendezvous go there as well, which storage of several nodes may not lock.
        """
        self.settings = settings
        self._weights = weights
        self.num_starts = 0
        self.log = settings.directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._client: JSONClient | None = None
        self._model = settings.directory / "model"
        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings.directory.chmod(0o700)
        _write_model_config(
            self._model, model_config, settings.max_context + SPARE_CONTEXT, fp8=settings.fp8
        )
        _copy_modules(settings.directory)

    @property
    def client(self) -> JSONClient:
        """Raises ConnectionLost where the server does not run."""
        if self._client is None or not self.is_running:
            raise ConnectionLost("the server does not run")
        return self._client

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the root of the server's process tree."""
        return self._process.pid if self._process is not None else None

    def start(self) -> JSONClient:
        """Start the server and wait until it is healthy. Raises ServerFailed with the end of its
        log.
        """
        self.stop()
        if self.settings.device == "cuda":
            self.settings.link_cuda_runtime()
        port, api_key = _free_port(), secrets.token_hex(32)
        self._weights.mkdir(mode=0o700, exist_ok=True)
        rendezvous = self._weights / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        # The key is in a file, because every user can read the arguments of a process.
        secret = _write_private(self._weights / "key.yaml", f"api-key: {api_key}\n")
        arguments = [*self.settings.arguments(self._model, port), "--config", str(secret)]
        command = [sys.executable, "-I", supervisor.__file__, str(self._weights)]
        command += [str(self.settings.python), "-m", "sglang.launch_server"]
        self.num_starts += 1
        with os.fdopen(
            os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb"
        ) as log:
            log.write(f"--- start {self.num_starts}, port {port}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.settings.environment(rendezvous),
                cwd=self.settings.directory,
                start_new_session=True,  # Ctrl-C is the trainer's to handle
                umask=0o077,
            )
        self._client = JSONClient(f"{HOST}:{port}", f"Bearer {api_key}")
        self._await_health(self._client)
        return self._client

    def stop(self) -> None:
        """End the server and all its processes. Safe to call again."""
        if self._process is None:
            return
        try:
            self._process.communicate(b".", timeout=30)  # to the supervisor
        except subprocess.TimeoutExpired:
            supervisor.kill_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()
        self._process, self._client = None, None

    def failure(self, what: str) -> ServerFailed:
        """Return an error that says what happened and what the server's log ends with."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        return ServerFailed(f"{what}; the log {self.log} ends with:\n{tail}")

    def _await_health(self, client: JSONClient) -> None:
        deadline = time.monotonic() + self.settings.start_timeout
        while time.monotonic() < deadline:
            if not self.is_running:
                status = None if self._process is None else self._process.returncode
                self.stop()
                raise self.failure(f"the SGLang server ended with status {status} while it started")
            if self._listens(client.port) and self.settings.is_healthy(client):
                return
            time.sleep(_POLL_SECONDS)
        self.stop()
        raise self.failure(
            f"the SGLang server was not healthy within {self.settings.start_timeout:g} s; raise"
            " --sglang-start-timeout or see the log"
        )

    def _listens(self, port: int) -> bool:
        """Return whether it is the server that listens on its port. The port was free when it was
        chosen, and whoever has taken it since must not be sent the key.
        """
        with suppress(psutil.NoSuchProcess):  # it has just ended
            server = psutil.Process(self.pid)
            return any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port
                for process in (server, *server.children(recursive=True))
                for each in process.net_connections("tcp")
            )
        return False


def _write_model_config(
    directory: Path, config: PretrainedConfig, context: int, *, fp8: bool
) -> None:
    """Write a model directory without weights.

    Without end tokens, because a completion ends where its request says, and without
    generation_config.json, whose top-k SGLang would take as the default.
    """
    values = config.to_dict() | {"eos_token_id": None, "bos_token_id": None}
    if fp8:
        values["quantization_config"] = QUANTIZATION_CONFIG
    # It sets the size of a table.
    values["max_position_embeddings"] = max(values["max_position_embeddings"], context)
    values["architectures"] = [find_family(config.model_type).architecture]
    directory.mkdir(mode=0o700, exist_ok=True)
    _write_private(directory / "config.json", json.dumps(values, indent=1, default=str))


def _copy_modules(directory: Path) -> None:
    """Copy what the server imports of this package into its working directory, because its
    environment may lack the package or have another version.
    """
    for module in (weight_loader, checksums):
        folder, (*packages, name) = directory, module.__name__.split(".")
        for package in packages:
            folder /= package
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / "__init__.py").touch(mode=0o600)
        _write_private(folder / f"{name}.py", Path(str(module.__file__)).read_text())


def _write_private(path: Path, text: str) -> Path:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]
