"""Products of bfloat16 from float32 copies, against float64."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ragen_mega.config import ParallelConfig
from ragen_mega.megatron import initialize
from ragen_mega.megatron.cpu import products


@pytest.fixture
def installed() -> Iterator[None]:
    """The products, for one test."""
    library = products.multiply_in_float32()
    yield
    library._destroy()
    products.multiply_in_float32.cache_clear()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(found: Tensor, exact: Tensor, sizes: Tensor) -> None:
    """One rounding to bfloat16 of a sum in float32, of terms that add up to `sizes`."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    error = (found.double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + 2.0**-18 * sizes).all()


SCALES = {"beta": 0.5, "alpha": -2.0}


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.usefixtures("installed")
def test_each_product_rounds_once(batch: tuple[int, ...], is_transposed: bool) -> None:
    a, b = drawn(*batch, 70, 130), drawn(*batch, 130, 50)
    b = drawn(*batch, 50, 130).mT if is_transposed else b
    c = drawn(*batch, 70, 50)
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    scaled = 0.5 * c.double() - 2 * exact, c.double().abs() + 2 * sizes
    plain, added = (torch.bmm, torch.baddbmm) if batch else (torch.mm, torch.addmm)
    check(plain(a, b), exact, sizes)
    check(a @ b, exact, sizes)
    check(added(c, a, b, **SCALES), *scaled)
    out = torch.empty_like(c)
    assert plain(a, b, out=out) is out
    check(out, exact, sizes)
    assert added(c, a, b, **SCALES, out=out) is out
    check(out, *scaled)
    in_place = torch.Tensor.baddbmm_ if batch else torch.Tensor.addmm_
    assert in_place(changed := c.clone(), a, b, **SCALES) is changed
    check(changed, *scaled)


@pytest.mark.usefixtures("installed")
def test_each_product_has_copies_as_operands() -> None:
    """torch's own products would pass the other tests too."""
    a, b = drawn(8, 8), drawn(2, 8, 8)
    for multiply in (
        lambda: a @ a,
        lambda: b @ b,
        lambda: torch.mm(a, a, out=torch.empty_like(a)),
        lambda: torch.bmm(b, b, out=torch.empty_like(b)),
        lambda: torch.addmm(a, a, a),
        lambda: torch.addmm(a, a, a, out=torch.empty_like(a)),
        lambda: torch.empty_like(a).addmm_(a, a),
        lambda: torch.baddbmm(b, b, b),
        lambda: torch.baddbmm(b, b, b, out=torch.empty_like(b)),
        lambda: torch.empty_like(b).baddbmm_(b, b),
    ):
        with torch.autograd.profiler.profile() as seen:
            multiply()
        assert sum(event.name == "aten::_to_copy" for event in seen.function_events) >= 2


@pytest.mark.usefixtures("installed")
def test_gradients_of_a_linear_layer() -> None:
    x, weight, bias = (drawn(*shape).requires_grad_() for shape in ((2, 9, 64), (48, 64), (48,)))
    grad = drawn(2, 9, 48)
    F.linear(x, weight, bias).backward(grad)
    rows, grads = x.detach().flatten(0, 1).double(), grad.flatten(0, 1).double()
    wide = weight.detach().double()
    check(x.grad.flatten(0, 1), grads @ wide, grads.abs() @ wide.abs())
    check(weight.grad, grads.T @ rows, grads.T.abs() @ rows.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_types_keep_their_bits(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    def results() -> list[Tensor]:
        a, b, c = (drawn(5, *shape, dtype=dtype) for shape in ((7, 8), (8, 6), (7, 6)))
        out = torch.empty_like(c[0])
        torch.mm(a[0], b[0], out=out)
        scales = {"beta": 2, "alpha": 3}
        return [a @ b, a[0] @ b[0], out, torch.addmm(c[0], a[0], b[0], **scales)] + [
            c.clone().baddbmm_(a, b, **scales),
            c[1].clone().addmm_(a[1], b[1], **scales),
        ]

    before = results()
    request.getfixturevalue("installed")
    assert all(map(torch.equal, before, results()))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("has", [None, "avx512_bf16", "amx_bf16"])
def test_they_are_for_processors_without_instructions(
    bf16: bool, has: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, has: True})
    monkeypatch.setattr(products, "multiply_in_float32", lambda: calls.append(True))
    initialize.initialize(ParallelConfig(bf16=bf16))
    assert calls == [True] * (bf16 and has is None)
