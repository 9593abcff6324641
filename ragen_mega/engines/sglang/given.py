"""An SGLang server that the user has started: asked, before training and after every loss, whether
it serves this model as the run needs it. It is never started or ended by a run.
"""

import time
from typing import Any

from transformers import PretrainedConfig

from ragen_mega.engines.sglang.http_json import ConnectionLost, JSONClient, RequestRefused
from ragen_mega.engines.sglang.server import SPARE_CONTEXT, ServerFailed, ServerSettings
from ragen_mega.models.families import find_family
from ragen_mega.system.addresses import credentials

AUTHORIZATION = "RAGEN_ENGINE_AUTHORIZATION"
"""The environment variable with the header that engines ask for, such as `Bearer KEY`."""
OLDEST = (0, 5, 17)
"""The oldest version of SGLang whose protocol was read."""
_FIRST_WITH_SAFE_ROUTES = (0, 5, 18)
"""The first version in which no later forward pass overwrites routes that are still to be copied
(sgl-project/sglang#34319).
"""
_SECONDS_TO_ANSWER = 20.0
_POLL_SECONDS = 1.0


class GivenServer:
    """The user's server at `settings.address`."""

    def __init__(self, settings: ServerSettings, model_config: PretrainedConfig) -> None:
        self.settings, self._model_config = settings, model_config
        self.num_starts = 0
        """Times that a connection began."""
        self.log = f"kept where {settings.address} runs"
        self._client: JSONClient | None = None

    @property
    def client(self) -> JSONClient:
        """Raises ConnectionLost where there is no connection."""
        if self._client is None:
            raise ConnectionLost(f"there is no connection to {self.settings.address}")
        return self._client

    @property
    def is_running(self) -> bool:
        return self._client is not None

    def start(self) -> JSONClient:
        """Connect to the server, which may come back within `start_timeout` after a loss. Raises
        ServerFailed if it does not, or is not what it was.
        """
        self.num_starts += 1
        deadline = time.monotonic() + self.settings.start_timeout
        while True:
            try:
                self._client = connect(self.settings, self._model_config)
            except ConnectionLost as error:
                if time.monotonic() > deadline:
                    raise ServerFailed(str(error)) from None
                time.sleep(_POLL_SECONDS)
            except ValueError as error:
                raise ServerFailed(str(error)) from None
            else:
                return self._client

    def stop(self) -> None:
        """Forget the connection."""
        self._client = None

    def failure(self, what: str) -> ServerFailed:
        """Return an error that says what happened."""
        return ServerFailed(f"{what}; look at the log of the engine at {self.settings.address}")


def connect(settings: ServerSettings, model_config: PretrainedConfig) -> JSONClient:
    """Return a connection to a server that fits the run. Raises ConnectionLost if nothing answers
    at the address, and ValueError if what answers does not fit.
    """
    assert settings.address is not None  # or there is nothing to connect to
    client = JSONClient(settings.address, credentials(AUTHORIZATION))
    about, model = _ask(client, "/server_info"), _ask(client, "/model_info")
    version = str(about.get("version"))
    if _numbers(version) < OLDEST:
        raise ValueError(
            f"the engine at {client.address} runs SGLang {version}, and the run needs"
            f" {'.'.join(map(str, OLDEST))} or newer; start it with that"
        )
    architecture = find_family(model_config.model_type).architecture
    # the type of the files that it was started from is unknown
    dtype = settings.dtype if about.get("dtype") == "auto" else about.get("dtype")
    asked: dict[str, tuple[Any, Any]] = {
        "dtype": (dtype, settings.dtype),
        "architectures": (model.get("architectures"), [architecture]),
        "tp_size": (about.get("tp_size"), settings.tensor_parallel_size),
        "ep_size": (about.get("ep_size"), settings.expert_parallel_size),
        "dp_size": (about.get("dp_size"), 1),
        "pp_size": (about.get("pp_size"), 1),
        "quantization": (about.get("quantization"), None),
        "speculative_algorithm": (about.get("speculative_algorithm"), None),
        "disaggregation_mode": (about.get("disaggregation_mode"), "null"),
        "preferred_sampling_params": (model.get("preferred_sampling_params"), None),
    }
    if settings.returns_routes and _numbers(version) < _FIRST_WITH_SAFE_ROUTES:
        asked["disable_overlap_schedule"] = about.get("disable_overlap_schedule"), True
    for name, (there, wanted) in asked.items():
        if there != wanted:
            raise ValueError(
                f"the engine at {client.address} has {name} {there}, and the run needs {wanted};"
                f" start it otherwise, or set {_REMEDIES.get(name, '--engine-addresses')}"
            )
    room = about.get("max_req_input_len") or 0
    if room + SPARE_CONTEXT < settings.max_context:
        raise ValueError(
            f"the engine at {client.address} takes {room} tokens, and max_context_length is"
            f" {settings.max_context}; start it with --context-length"
            f" {settings.max_context + SPARE_CONTEXT}, or lower --max-context-length"
        )
    return client


_REMEDIES = {
    "dtype": "--bf16, or drop it",
    "architectures": "--load to its model",
    "tp_size": "--rollout-tensor-parallel-size to it",
    "ep_size": "--rollout-expert-parallel-size to it",
    "disable_overlap_schedule": "--routing-replay policy",
}


def _ask(client: JSONClient, path: str) -> dict[str, Any]:
    """Return what the server says of itself."""
    where = f"the engine at {client.address}"
    try:
        answer = client.call("GET", path, timeout=_SECONDS_TO_ANSWER)
    except ConnectionLost as error:
        raise ConnectionLost(
            f"{where} gives no answer within {_SECONDS_TO_ANSWER:.0f} s ({error}); start it, or"
            " correct --engine-addresses"
        ) from None
    except RequestRefused as error:
        raise ValueError(
            f"{where} refuses ({' '.join(str(error).split())[:200]}); is it SGLang's, and does"
            f" {AUTHORIZATION} hold its key, as 'Bearer KEY'?"
        ) from None
    if not isinstance(answer, dict):
        raise ValueError(f"{where} answers {path} as SGLang does not; correct --engine-addresses")
    return answer


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (0, 5, 17)."""
    parts = version.split(".")[:3]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
