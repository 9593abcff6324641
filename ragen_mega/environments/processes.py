"""Environments in separate processes, for those that hold the GIL while they compute.

A host process holds several environments and runs their calls one at a time, in its main thread;
the proxy in this process forwards every call to its host. Environments are lost with their host;
the next one that is built starts a new host. An environment may itself start processes: they end
with its host, and this with the process that has started it.
"""

import atexit
import ctypes
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from ragen_mega.config.sections.agent import is_agent
from ragen_mega.environments import calls
from ragen_mega.environments.pool import PLACE, EnvironmentFailed, Worker, briefly, guarded, where
from ragen_mega.environments.protocol import (
    OUTCOME,
    STEP_INFO,
    Environment,
    Narrator,
    Observation,
    Solver,
    StepResult,
)
from ragen_mega.environments.registry import make
from ragen_mega.environments.tool_calls import WrongCall
from ragen_mega.system.outputs import guard_outputs

_METHOD = "a method"
_SOLVER = "a solver"
_KINDS = (
    *(AttributeError, WrongCall, ValueError, TypeError, FloatingPointError, TimeoutError),
    RecursionError,
)
"""Kinds of errors that mean something to who calls an environment, each before its base."""
_SECONDS_TO_DIE = 30.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def builder(settings: Any, name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a function that builds environment `name`: in host processes if the `settings`, an
    `EnvironmentConfig`, name any, else in this process.
    """
    num_processes = settings.environment_processes
    if is_agent(name):  # which has its own processes
        return partial(make, name, **dict(options) | {"processes": num_processes})
    if not num_processes:
        return partial(make, name, **options)
    return partial(HostedEnvironment, name, options, num_processes, settings.environment_timeout)


def opened(
    settings: Any, name: str, options: Mapping[str, Any]
) -> AbstractContextManager[tuple[Worker, Environment]]:
    """Return the environment `name` of `builder`, for its declarations; see `briefly`."""
    return briefly(name, builder(settings, name, options), settings.environment_timeout)


class Host:
    """The near end of a host process."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        """`variables`: variables of its environment."""
        context = multiprocessing.get_context("spawn")  # threads and devices do not survive a fork
        self._pipe, far_end = context.Pipe()
        self._lock = threading.Lock()
        self._process = context.Process(target=_serve, args=(far_end, variables or {}), daemon=True)
        self._process.start()
        far_end.close()
        atexit.register(self.end)  # before multiprocessing ends the host alone

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, timeout: float, *request: Any) -> Any:
        """Return the host's answer. Raises the environment's error if `_portable` keeps its type,
        else RuntimeError; also if the host is gone. Raises TimeoutError if it took too long and was
        killed for that.
        """
        is_late = False
        with self._lock:
            try:
                self._pipe.send(request)
                if is_late := not self._pipe.poll(timeout or None):
                    raise EOFError
                answer, error = self._pipe.recv()
            except (OSError, EOFError) as gone:
                self.end()
                if is_late:
                    raise TimeoutError(
                        f"took longer than {timeout:g} s; the process of the environment is gone"
                    ) from gone
                raise RuntimeError("the process of the environment is gone") from gone
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """Kill the host with all that its environments have started, and fail a call that it
        answers at present.
        """
        atexit.unregister(self.end)
        assert self._process.pid is not None  # it was started
        _end_family(self._process.pid)
        self._process.kill()  # which may not lead its session yet
        self._process.join(_SECONDS_TO_DIE)
        if self._process.is_alive():  # a driver holds it
            said = f"the process of environments {self._process.pid} was killed and has not ended"
            print(said, file=sys.stderr, flush=True)


class HostedEnvironment:
    """A proxy of environment `name` in one of `num_processes` host processes, with its attributes.
    Arguments, answers and attributes are pickled.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        num_processes: int = 1,
        timeout: float = 0.0,
        *,
        host: Host | None = None,
    ) -> None:
        """`timeout`: seconds per call (0: no limit), after which the host is killed; `host`: one
        that this environment has alone. Raises ValueError as `make` does.
        """
        self._host = host or _host(num_processes)
        self._timeout = timeout
        self._key = -1  # until it has one
        self._key = self._ask("make", name, dict(options))

    def reset(self, seed: int, **keywords: Any) -> Observation:
        return self._ask("reset", seed, keywords)

    def step(self, action: Any) -> StepResult:
        return self._ask("step", action)

    def close(self) -> None:
        self._ask("close")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._ask("get", name)
        if value == _METHOD:
            return partial(self._ask, "call", name)
        if value == _SOLVER:
            parts = (partial(self._call, name, part) for part in ("references", "optimal_actions"))
            return Solver(*parts)
        if isinstance(value, Narrator):
            explain = value.explain and partial(self._call, name, "explain")
            return replace(value, describe=partial(self._call, name, "describe"), explain=explain)
        return value

    def _call(self, owner: str, part: str, _: Any, argument: Any) -> Any:
        """Call a function of the solver or narrator in the host, where it may copy the environment
        and read its private attributes.
        """
        return self._ask("part", owner, part, argument)

    def _ask(self, *request: Any) -> Any:
        return self._host.ask(self._timeout, self._key, *request)


def end_hosts() -> None:
    """End all hosts; environments in them are lost."""
    with _hosts_lock:
        while _hosts:
            _hosts.popitem()[1].end()


def _end_family(leader: int) -> None:
    """Kill a host, the processes below it, and those that are left of its session."""
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(leader).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


_hosts: dict[int, Host] = {}
_places = itertools.count()
_hosts_lock = threading.Lock()


def _host(num_processes: int) -> Host:
    """Return the host of the next environment, round-robin."""
    with _hosts_lock:
        place = next(_places) % num_processes
        if place in _hosts and not _hosts[place].is_alive:
            _hosts.pop(place).end()
        if place not in _hosts:
            _hosts[place] = Host()
        return _hosts[place]


def _serve(pipe: Connection, variables: Mapping[str, str]) -> None:
    """Answer requests, in the host, until the other end is gone."""
    os.environ.update(variables)
    _lead_family(pipe)
    guard_outputs(is_needed=False)  # an environment may print
    environments: dict[int, Any] = {}
    while True:
        try:
            request = pipe.recv()
        except (OSError, EOFError):
            _end_family(os.getpid())
        answer = error = None
        try:
            answer = guarded(partial(_act, environments, *request))
        except EnvironmentFailed as failed:
            error = _portable(failed.__cause__ or failed)
        pipe.send((answer, error))


def _lead_family(pipe: Connection) -> None:
    """Let environments of this process start processes, which end with it, and end it with its
    parent, whatever it does then.
    """
    multiprocessing.current_process().daemon = False  # which may have no children
    os.setsid()
    if sys.platform == "linux":  # what loses its parent stays below this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.register_at_fork(after_in_child=pipe.close)  # or the parent would not see a host die

    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a host

    def follow() -> None:
        parent.join()
        _end_family(os.getpid())

    threading.Thread(target=follow, name="parent", daemon=True).start()


def _act(environments: dict[int, Any], key: int, kind: str, *request: Any) -> Any:
    """Handle a request to one of the environments; raises if the answer cannot be pickled."""
    if kind == "make":
        environments[place := len(environments)] = make(request[0], **request[1])
        return place
    environment = environments[key]
    answer: Any
    match kind:
        case "reset":
            answer = calls.reset(environment, request[0], **request[1])
        case "step":
            result = calls.step(environment, request[0])
            kept = (*STEP_INFO, OUTCOME)
            info = {name: result.info[name] for name in kept if name in result.info}
            answer = replace(result, info=info)  # the rest is not used, and may not be picklable
        case "close":
            answer = environments[key] = None
            calls.close(environment)
        case "call":
            answer = calls.settled(getattr(environment, request[0])(*request[1:]))
        case "part":
            owner, part, argument = request
            answer = getattr(getattr(environment, owner), part)(environment, argument)
        case _:
            value = getattr(environment, request[0])
            is_solver = isinstance(value, Solver)
            answer = _METHOD if callable(value) else _SOLVER if is_solver else value
            if isinstance(value, Narrator):  # whose functions may not be picklable
                there: Any = _METHOD
                answer = replace(value, describe=there, explain=value.explain and there)
    pickle.dumps(answer)
    return answer


def _portable(error: BaseException) -> Exception:
    """Return the error in a form that the other process can unpickle, with the same meaning, and
    with the place, which only this process knows.
    """
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), None)
    portable = kind(str(error)) if kind else RuntimeError(f"{type(error).__name__}: {error}")
    setattr(portable, PLACE, where(error))
    return portable
