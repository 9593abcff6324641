"""Weights that wait, on the ranks that send them, until the ranks that sample have the rollouts
that need them.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ragen_mega.ranks import collectives
from ragen_mega.ranks.collectives import on_main

_FILE = "weights_{:08d}"
"""Beginning of the name of a checkpoint's files with weights of that many steps."""


class Shares:
    """Versions of whole weights: each rank that sends has a share of the tensors of each version,
    and no other rank has any. Methods are collective over the ranks that train unless they say
    otherwise.
    """

    def __init__(self, senders: Sequence[int], *, on_device: int) -> None:
        """Begin without any, for senders of these ranks, of which each keeps up to `on_device`
        bytes of the newest version where they are, and all others in host memory.
        """
        self._on_device, self._num_senders = on_device, len(senders)
        rank = collectives.rank()
        self.index = senders.index(rank) if rank in senders else None
        """Index of this rank among those that send; None if it does not."""
        self._versions: dict[int, dict[str, Tensor]] = {}

    def __contains__(self, version: int) -> bool:
        """Return whether the ranks hold a version. Not collective."""
        return version in self._versions

    def __getitem__(self, version: int) -> dict[str, Tensor]:
        """Return this rank's share of a version. Not collective."""
        return self._versions[version]

    @property
    def newest(self) -> dict[str, Tensor]:
        """This rank's share of the newest version. Not collective. Raises ValueError if there is
        none.
        """
        return self._versions[max(self._versions)]

    def keep(self, versions: Collection[int]) -> None:
        """Drop all other versions. Not collective."""
        self._versions = {each: held for each, held in self._versions.items() if each in versions}

    def add(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a stream of the newest weights."""
        for held in self._versions.values():  # one version at most is on the device
            held.update({name: tensor.to("cpu") for name, tensor in held.items()})
        self._versions[version] = self.copied(weights, on_device=self._on_device)

    def copied(
        self, weights: Iterable[tuple[str, Tensor]], *, on_device: int = 0
    ) -> dict[str, Tensor]:
        """Copy a stream, about the same number of bytes on each rank that sends; returns this
        rank's share, of which the first `on_device` bytes are where they were.
        """
        held, totals = dict[str, Tensor](), [0] * self._num_senders
        for name, tensor in weights:
            index = totals.index(min(totals))
            totals[index] += tensor.nbytes
            if index == self.index:
                where = tensor.device if totals[index] <= on_device else torch.device("cpu")
                held[name] = tensor.to(where, copy=True).contiguous()
        if torch.cuda.is_available():  # another stream will read them
            torch.cuda.current_stream().synchronize()
        return held

    def files(self, versions: Iterable[int]) -> dict[str, dict[str, Tensor]]:
        """Return a map: name -> content of this rank's files of a checkpoint with these versions.
        Not collective.
        """
        rank = collectives.rank()
        names = {version: f"{_FILE.format(version)}_{rank}.safetensors" for version in versions}
        return {name: self[version] for version, name in names.items() if self[version]}

    def read(self, directory: Path, versions: Iterable[int]) -> None:
        """Read the versions that are in a checkpoint, whichever ranks have written them."""
        patterns = {version: f"{_FILE.format(version)}*" for version in versions}
        paths = on_main(lambda: {each: sorted(directory.glob(p)) for each, p in patterns.items()})
        for version, there in paths.items():
            if there:
                self._versions[version] = held = dict[str, Tensor]()
                for path in there if self.index is not None else ():
                    with safe_open(path, framework="pt") as file:
                        for name in sorted(file.keys())[self.index :: self._num_senders]:
                            held[name] = file.get_tensor(name).clone()  # the file may be deleted
