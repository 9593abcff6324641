"""Low-rank adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, whose
header names the model that the adapter belongs to by the digest of its files.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ragen_mega.config import LoraConfig
from ragen_mega.config.sections.lora import TARGETS
from ragen_mega.models.lora import PREFIX, expected_adapters, kind_of
from ragen_mega.models.shape import ModelShape
from ragen_mega.storage.integrity import system_error
from ragen_mega.storage.model_readers import check_finite

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base"
_FIXED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Entries of adapter_config.json that have one supported value, which they have if absent."""


class AdapterReader:
    """An adapter in a directory of PEFT's format: name without PEFT's prefix -> tensor, None if
    there is no such. Raises ValueError for one that is damaged or of a kind that is not supported.
    """

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self._directory = directory
        try:
            self.config = json.loads((directory / CONFIG).read_text())
            with safe_open(directory / WEIGHTS, framework="pt") as file:
                self._base = (file.metadata() or {}).get(_BASE)
                names = file.keys()  # a method of safetensors
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"{directory} must hold {CONFIG} and {WEIGHTS} of PEFT ({error}); give the folder"
                " that save_pretrained of a PEFT model wrote"
            ) from None
        for name, value in _FIXED.items():
            if (found := self.config.get(name, value)) != value and (found or value):
                raise ValueError(f"{name} in {directory / CONFIG} must be {value}, not {found}")
        self._tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        for name, tensor in self._tensors.items():
            check_finite(name, tensor)
        layer = shape.family.layer
        kinds = {kind_of(w) for w in layer if self._tensors.keys() & _names(w, shape)}
        self._there = {kind_of(weight) for weight in layer}
        targets = [name for name in TARGETS if name in kinds]
        self.lora = LoraConfig(
            lora_rank=self.config.get("r"),
            lora_alpha=float(self.config.get("lora_alpha", 8)),
            lora_targets=",".join(targets) or "all",
        )
        expected = expected_adapters(shape, self.lora)
        found = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        if found != expected:
            differing = sorted(
                name for name in found | expected if found.get(name) != expected.get(name)
            )
            shapes = [table.get(differing[0], "is missing") for table in (found, expected)]
            raise ValueError(
                f"{differing[0]}: {shapes[0]} in {directory}, {shapes[1]} by the model; give --load"
                " the model of this adapter, and --lora-targets the layers that it stands beside"
            )

    def check(self, lora: LoraConfig, base: str | None) -> None:
        """Raise ValueError unless the adapter fits the settings of a run, and the digest of its
        model, where both are known.
        """
        for name in ("lora_rank", "lora_alpha", "targets"):
            own, given = getattr(self.lora, name), getattr(lora, name)
            if name == "targets":  # of the kinds that the model has
                own, given = (",".join(sorted(kinds & self._there)) for kinds in (own, given))
            if own != given:
                flag = "--lora-targets" if name == "targets" else f"--{name.replace('_', '-')}"
                raise ValueError(f"adapter {self._directory} has {name} {own}; set {flag} {own}")
        if None not in (base, self._base) and base != self._base:
            raise ValueError(
                f"adapter {self._directory} was trained beside another model, with the digest"
                f" {self._base} and not {base}; give that one"
            )

    def __call__(self, name: str) -> Tensor | None:
        return self._tensors.get(name)


def _names(weight: Any, shape: ModelShape) -> set[str]:
    """Return the names of A beside a weight in the first layer."""
    names = (tensor.replace(".weight", ".lora_A.weight") for tensor in weight.tensors)
    return {f"model.layers.0.{name.format(e=0)}" for name in names}


def peft_config(names: Iterable[str], lora: LoraConfig, *, model: str) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter with tensors of these names."""
    return _FIXED | {
        "base_model_name_or_path": model,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names}),
    }


def save_adapter(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    lora: LoraConfig,
    *,
    model: str,
    base: str | None,
) -> None:
    """Write an adapter in PEFT's format. `model`: name or folder of its model, `base` the digest of
    that. Raises OSError on a full disk.
    """
    named = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    config = peft_config(named, lora, model=model)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    try:
        save_file(named, directory / WEIGHTS, {"format": "pt"} | ({_BASE: base} if base else {}))
    except SafetensorError as error:
        raise system_error(error, directory) or error from None
