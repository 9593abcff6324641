"""Peaks of GPUs and their links, from data sheets, and the shares that programs reach."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType

NODE = 8
"""GPUs that NVLink joins, where a machine does not say otherwise."""


@dataclass(frozen=True)
class Hardware:
    """Peaks of one GPU and its links, in operations, bytes and seconds."""

    name: str
    bf16: float
    """Dense operations a second; half of what data sheets give with sparsity."""
    fp8: float
    """The same in FP8; 0 where the GPU has none."""
    fp32: float
    """The same in float32, outside of the units that multiply narrower numbers."""
    memory: float
    """Bytes a second of its own memory."""
    gpu_gib: float
    nvlink: float
    """Bytes a second in one direction to the other GPUs of the node."""
    network: float
    """Bytes a second in one direction to other nodes: a network card for every GPU."""
    host_link: float
    """Bytes a second to or from host memory."""
    dollars: float
    """Price of an hour of one GPU, on demand; a default, prices differ by a factor of three."""
    source: str
    node: int = NODE
    cores: int = 0
    """Ranks that have a core each, where ranks compute on the processor. Then starting a
    kernel is work too, and no rank waits for a device. 0: every rank has a GPU.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible number."""
        for entry in fields(self):
            value, may_be_none = getattr(self, entry.name), entry.name in ("fp8", "cores")
            if entry.type == "str":
                continue
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number or value < 0 or not (value or may_be_none):
                raise ValueError(
                    f"{entry.name} of hardware {self.name} must be a positive number, not {value!r}"
                )

    def peak(self, itemsize: int, *, fp8: bool = False) -> float:
        """Return the operations a second of products of numbers of so many bytes, or in FP8."""
        if fp8:
            return self.fp8
        return self.bf16 if itemsize == 2 else self.fp32


_TB, _GB, _T = 1e12, 1e9, 1e12
_PRICE = "price: middle of specialised clouds in May 2026, mercatus-ai.com/blog/cloud-gpu-pricing"
_OWN_PRICE = "price: a guess, no list was found"
_TABLE = (
    Hardware(
        "A100",
        312 * _T,
        0,
        19.5 * _T,
        2.039 * _TB,
        80,
        300 * _GB,
        25 * _GB,
        25 * _GB,
        1.30,
        f"NVIDIA A100 80GB SXM data sheet; PCIe 4, HDR InfiniBand (DGX A100); {_PRICE}",
    ),
    Hardware(
        "H100",
        989.4 * _T,
        1978.9 * _T,
        67 * _T,
        3.35 * _TB,
        80,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        3.00,
        f"NVIDIA H100 SXM data sheet; PCIe 5, NDR InfiniBand (DGX H100); {_PRICE}",
    ),
    Hardware(
        "H100-HBM2e",
        886 * _T,
        1773 * _T,
        67 * _T,
        2.4 * _TB,
        96,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        3.00,
        "as H100 with the memory of torchtitan's benchmarks/llama3_h100_202412; peaks at its 500 W"
        f" between the data sheets of 400 W (NVL) and 700 W (SXM), by their watts; {_PRICE}",
    ),
    Hardware(
        "H200",
        989.4 * _T,
        1978.9 * _T,
        67 * _T,
        4.8 * _TB,
        141,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        4.00,
        f"NVIDIA H200 SXM data sheet; PCIe 5, NDR InfiniBand (DGX H200); {_PRICE}",
    ),
    Hardware(
        "B200",
        2250 * _T,
        4500 * _T,
        75 * _T,
        8.0 * _TB,
        180,
        900 * _GB,
        50 * _GB,
        50 * _GB,
        5.00,
        f"NVIDIA DGX B200 data sheet (dense); PCIe 5, NDR InfiniBand; {_OWN_PRICE}",
    ),
    Hardware(
        "GB200",
        2500 * _T,
        5000 * _T,
        80 * _T,
        8.0 * _TB,
        186,
        900 * _GB,
        50 * _GB,
        225 * _GB,
        6.00,
        f"NVIDIA GB200 NVL72 data sheet (dense), a 72nd of it; NVLink-C2C; {_OWN_PRICE}",
        node=72,
    ),
    Hardware(
        "B300",
        2250 * _T,
        4500 * _T,
        75 * _T,
        8.0 * _TB,
        270,
        900 * _GB,
        100 * _GB,
        50 * _GB,
        6.00,
        f"NVIDIA DGX B300 data sheet (dense), ConnectX-8; {_OWN_PRICE}",
    ),
    Hardware(
        "GB300",
        2500 * _T,
        5000 * _T,
        80 * _T,
        8.0 * _TB,
        279,
        900 * _GB,
        100 * _GB,
        225 * _GB,
        7.00,
        f"NVIDIA GB300 NVL72 data sheet (dense), a 72nd of it; ConnectX-8; {_OWN_PRICE}",
        node=72,
    ),
    Hardware(
        "H800",
        989.4 * _T,
        1978.9 * _T,
        67 * _T,
        3.35 * _TB,
        80,
        200 * _GB,
        50 * _GB,
        50 * _GB,
        3.00,
        f"as H100 with NVLink at 400 GB/s both ways together; {_OWN_PRICE}",
    ),
    Hardware(
        "H20",
        148 * _T,
        296 * _T,
        44 * _T,
        4.0 * _TB,
        96,
        450 * _GB,
        50 * _GB,
        50 * _GB,
        1.50,
        f"H20 as vendors' manuals state it; {_OWN_PRICE}",
    ),
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType({row.name: row for row in _TABLE})


def constant(value: float, low: float, high: float) -> float:
    """Make a field of `Constants` with the range in which it keeps its meaning."""
    return field(default=value, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Constants:
    """The shares of the peaks that programs reach, and the seconds that they lose besides. Fitted
    to published steps or by a calibration; outside of its range a constant would mean something
    else.
    """

    product: float = constant(0.72, 0.1, 0.95)
    """Share of the peak in a large matrix product, its reads and writes not included."""
    product_fp8: float = constant(0.68, 0.3, 0.95)
    """The same of the FP8 peak, quantisation included."""
    tile: float = constant(256.0, 1.0, 1024.0)
    """Time to start and finish a tile of a product, in inner elements."""
    attention: float = constant(0.5, 0.001, 0.8)
    """Share of the bfloat16 peak in attention."""
    memory: float = constant(0.66, 0.01, 1.0)
    """Share of the memory's speed in passes over activations and optimizer state."""
    link: float = constant(0.9, 0.3, 0.9)
    """Share of the links' speed in collectives."""
    latency: float = constant(15e-6, 1e-6, 1e-1)
    """Seconds of a small collective."""
    launch: float = constant(0.00088, 1e-5, 1e-1)
    """Seconds in which the host starts the kernels of a layer's forward pass; of a backward pass
    twice that. The GPU waits if its work takes less.
    """
    adapter: float = constant(0.0061, 0.0, 1e-1)
    """Further seconds of a layer's forward pass with adapters under FSDP, in whose programs nothing
    hides them; of a backward pass twice that.
    """
    update: float = constant(0.089, 0.0, 2.0)
    """Seconds of an optimizer step on the host: data, waiting for norms, logging."""
    update_layer: float = constant(0.0, 0.0, 1e-1)
    """Further seconds of it for every layer on the rank: small tensors, one after the other."""
    micro: float = constant(0.0, 0.0, 1.0)
    """Seconds of a forward pass of a microbatch besides its layers; of a backward pass twice that.
    """
    start: float = constant(0.0, 0.0, 2.0)
    """Seconds around a pass over a batch: packing, sharing prefixes, exchange of the results."""
    turn: float = constant(0.0, 0.0, 1.0)
    """Seconds of a turn besides its tokens: its text, its environment, joining the batch."""
    exposed: float = constant(0.3, 0.0, 1.0)
    """Share of overlapped communication that is waited for all the same."""
    collective: float = constant(0.00024, 0.0, 1e-2)
    """Further seconds in which the host starts a collective of tensor parallelism, of which a layer
    has four.
    """
    permute: float = constant(11.0, 2.0, 64.0)
    """Reads and writes of a routed token's hidden state in a mixture's forward pass, besides those
    of the products: sorted by expert, packed for the exchange and back.
    """
    route: float = constant(0.002, 0.0, 1e-2)
    """Further seconds in which the host starts the kernels of a layer of experts: router, sorting,
    waiting for the numbers of tokens, one product an expert.
    """
    decode_memory: float = constant(0.95, 0.02, 0.95)
    """Share of the memory's speed at which a decode step reads weights and keys and values."""
    decode_product: float = constant(0.5, 0.02, 0.95)
    """Share of the peak in the thin products of a decode step."""
    decode_host: float = constant(0.00087, 0.0, 1e-1)
    """Seconds of a decode step on the host, whatever it decodes: scheduling, output."""
    decode_layer: float = constant(5.6e-5, 1e-6, 1e-1)
    """Further seconds of a layer in a decode step: small kernels."""
    decode_sequence: float = constant(3e-5, 1e-7, 1e-1)
    """Seconds of a decode step for each sequence: sampling, scheduling, output."""
    decode_reduce: float = constant(1e-5, 1e-6, 1e-1)
    """Seconds of a small all-reduce in a decode step, which a graph starts."""
    decode_expert: float = constant(0.64, 0.2, 1.0)
    """Speed of reading the weights of experts, relative to dense ones."""
    routing: float = constant(0.78, 0.5, 1.0)
    """Texts whose choices of experts are independent, as an exponent of the texts of a step: texts
    on one subject choose alike.
    """
    decode_routed: float = constant(0.065, 0.01, 0.95)
    """Share of the peak in a decode step's products with experts, each of which sees few rows."""
    sync: float = constant(2.0e9, 1e8, 1e12)
    """Bytes a second at which a GPU's engine takes over weights, in buckets with their checks:
    published is 3.0 s for the 61 GB of a 30B-A3B on eight H200 (vime issue 175).
    """
    untuned: float = constant(1.0, 1.0, 3.0)
    """Time of a training step in a layout that nobody has tuned, over that of a tuned one."""
    overhead: float = constant(3e-6, 0.0, 1e-3)
    """Seconds of a step of reinforcement learning outside its phases, for each of its tokens: the
    host's data, rewards, logs.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for a constant out of its range."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            low, high = entry.metadata["low"], entry.metadata["high"]
            if not low <= value <= high:
                raise ValueError(
                    f"constant {entry.name} must be from {low:g} to {high:g}, not {value:g}; the"
                    " measurement was disturbed: repeat it on an idle machine"
                )


@dataclass(frozen=True)
class Machine:
    """A kind of GPU and the shares of its peaks that programs reach."""

    hardware: Hardware
    constants: Constants = Constants()

    def shared_by(self, num_ranks: int) -> Machine:
        """Return the machine of each rank where more ranks than cores take turns."""
        cores = self.hardware.cores
        if not cores or num_ranks <= cores:
            return self
        slower, now = num_ranks / cores, self.hardware
        rates = ("bf16", "fp32", "memory", "nvlink", "network", "host_link")
        seconds = (
            "latency", "launch", "collective", "update", "update_layer", "micro", "start", "turn",
            "decode_host", "decode_layer", "decode_reduce", "decode_sequence",
        )  # fmt: skip
        return Machine(
            replace(now, **{name: getattr(now, name) / slower for name in rates}),
            replace(
                self.constants,
                **{name: slower * getattr(self.constants, name) for name in seconds},
                sync=self.constants.sync / slower,
            ),
        )

    def link(self, num_ranks: int, stride: int = 0) -> float:
        """Return the bytes a second of a collective among ranks that lie `num_ranks` apart at most.
        If every `stride`-th rank takes part, those of a node share what comes in through their
        network cards; without a stride each has its own bytes to exchange.
        """
        hardware = self.hardware
        if num_ranks <= hardware.node:
            return self.constants.link * hardware.nvlink
        cards = max(1, hardware.node // stride) if stride else 1
        return self.constants.link * min(hardware.nvlink, cards * hardware.network)


def find_machine(name: str, constants: Constants | None = None) -> Machine:
    """Find a row of the table, in any letter case, under `constants` (default: those of the
    published steps), or read what --calibrate wrote; a file without constants gets those. Raises
    ValueError for neither.
    """
    usual = constants or Constants()
    rows = {known.lower(): row for known, row in HARDWARE.items()}
    if name.lower() in rows:
        return Machine(rows[name.lower()], usual)
    if not name.endswith(".json"):
        raise ValueError(
            f"--hardware must be one of {', '.join(HARDWARE)}, not {name!r}; take the nearest, or"
            " measure yours with --calibrate"
        )
    try:
        values = json.loads(Path(name).read_text())
        measured = values.get("constants")
        hardware = Hardware(**values["hardware"])
        return Machine(hardware, usual if measured is None else Constants(**measured))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"--hardware {name} must be a file that --calibrate wrote ({error}); write it again"
        ) from None
