"""Imported before torch: torch finds CUDA devices, Transformer Engine its native module, and Triton
interprets.

The number of devices is RAGEN_FAKE_CUDA. Nothing heavy is imported here: every Python process of a
job passes through here, even those that never import torch.
"""

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from tests.fake_cuda import build


class _Around(MetaPathFinder):
    """Calls one function just before a module is executed and one, with the module, just after."""

    def __init__(
        self,
        name: str,
        after: Callable[[ModuleType], None],
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.after, self.before = name, after, before

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_between(module: ModuleType) -> None:
            self.before()
            execute(module)
            self.after(module)

        spec.loader.exec_module = execute_between  # type: ignore[method-assign]
        return spec


class _StandIn(MetaPathFinder):
    """Finds Transformer Engine's native module in this folder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "transformer_engine_torch":
            return None
        file = Path(__file__).with_name("transformer_engine_torch.py")
        return importlib.util.spec_from_file_location(name, file)


class _NoExport(ModuleType):
    """Transformer Engine's ONNX operators, which it always imports and this project never uses;
    their own imports are large.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _load_device() -> None:
    """torch looks for CUDA once, while it is imported."""
    importlib.import_module(Path(build.DEVICE).stem)


def _install_device(torch: ModuleType) -> None:
    from tests.fake_cuda import device

    device.install()


def _install_stand_in(common: ModuleType) -> None:
    common.load_framework_extension = lambda framework: None


def _interpret(triton: ModuleType) -> None:
    from tests.fake_cuda import kernels

    kernels.count_interpreted(triton)


def _in_plain_torch(dispatch: ModuleType) -> None:
    from tests.fake_cuda import kernels

    kernels.in_plain_torch(dispatch)


def _permute_in_plain_torch(triton_permutation: ModuleType) -> None:
    from tests.fake_cuda import permutation

    permutation.in_plain_torch(triton_permutation)


def _activate() -> None:
    if reason := build.obstacle():
        print(f"error: RAGEN_FAKE_CUDA is set, and {reason}", file=sys.stderr)
        os._exit(2)  # Python would take an exception here for its own fault
    libraries = build.libraries()
    ctypes.CDLL(str(libraries / build.ACCELERATOR), mode=ctypes.RTLD_GLOBAL)
    sys.path.append(str(libraries))  # of the extension module
    sys.meta_path.insert(0, _Around("torch", _install_device, _load_device))
    sys.meta_path.insert(0, _Around("ragen_kernels.dispatch", _in_plain_torch))
    if importlib.util.find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"  # triton decides while it is imported
        sys.meta_path.insert(0, _Around("triton", _interpret))
    if transformer_engine := build.transformer_engine():
        os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it then does not look for native libraries
        sys.path.append(str(transformer_engine))
        sys.meta_path.insert(0, _StandIn())
        export = "transformer_engine.pytorch.onnx_extensions"
        sys.modules[export] = _NoExport(export)
        sys.meta_path.insert(0, _Around("transformer_engine.common", _install_stand_in))
        triton_permutation = "transformer_engine.pytorch.triton.permutation"
        sys.meta_path.insert(0, _Around(triton_permutation, _permute_in_plain_torch))


_activate()
