"""The checksum against its definition in Python's integers, what it notices, and the errors about
names.
"""

import pytest
import torch

from ragen_mega.data.checksums import check_names, checksum


def splitmix64(value: int) -> int:
    """The published generator's output for its `value`-th state from 0."""
    value = value * 0x9E3779B97F4A7C15 % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def in_plain_python(tensor: torch.Tensor) -> int:
    """The hash of a tensor of one chunk."""
    data = tensor.contiguous().flatten().view(torch.uint8).tolist()
    data += [0] * (-len(data) % 4)
    words = [
        int.from_bytes(bytes(data[i : i + 4]), "little", signed=True)
        for i in range(0, len(data), 4)
    ]
    total = (
        sum(word * splitmix64(i + 1) for i, word in enumerate(words)) * (splitmix64(1) | 1) % 2**64
    )
    for size in tensor.shape:
        total = ((total ^ size) * 0x9E3779B97F4A7C15 + 1) % 2**64
    return total


def test_splitmix64_is_the_published_one() -> None:
    assert splitmix64(1) == 0xE220A8397B1DCDAF  # its first output from seed 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(5,), (7, 3), (2, 3, 5), (0,)])
def test_checksum_is_the_multilinear_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape)).to(dtype)
    assert checksum(tensor) == in_plain_python(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_notices_what_goes_wrong_in_resharding(dtype: torch.dtype) -> None:
    tensor = torch.randn(600, 1000).to(dtype)  # several chunks
    changed = {
        "itself": tensor,
        "transposed": tensor.t(),
        "reshaped": tensor.view(300, 2000),
        "negated": -tensor,
    }
    changed["halves exchanged"] = tensor.roll(300, 0)
    changed["shifted by a row"] = tensor.roll(1, 0)
    changed["last row zero"] = torch.cat([tensor[:-1], torch.zeros_like(tensor[:1])])
    changed["chunks exchanged"] = tensor.flatten().roll(2**18 * 4 // dtype.itemsize).view_as(tensor)
    for index in (0, 1, 599_999):
        flipped = tensor.clone()
        flipped.view(-1)[index] *= -1
        changed[f"sign of {index}"] = flipped
    assert len({checksum(value) for value in changed.values()}) == len(changed)
    assert checksum(tensor.t().contiguous().t()) == checksum(
        tensor
    )  # the memory layout does not matter


def test_names_are_checked_both_ways() -> None:
    check_names(["a", "b"], {"b", "a"})
    for sent, message in (
        (["a"], "missing: b;"),
        (["a", "b", "c"], "unknown: c;"),
        (["a", "b", "a"], "sent twice: a;"),
        ([], "missing: a, b;"),
    ):
        with pytest.raises(ValueError, match=message):
            check_names(sent, ["a", "b"])
    with pytest.raises(ValueError, match="missing: n0, .* 7 more"):
        check_names([], [f"n{i}" for i in range(10)])
