"""The fake CUDA device refuses what a GPU refuses, and shows what a GPU would only suffer from:
each test puts a defect in by hand.
"""

import gc

import pytest
import torch
import torch.distributed as dist

from ragen_mega.ranks import collectives
from tests.support.forked_ranks import on_ranks

native = pytest.importorskip("fake_cuda_device", reason="needs the fake CUDA device")
from tests.fake_cuda.counts import counted  # noqa: E402 there only beside the device

pytestmark = pytest.mark.gpu


def on_device(*shape: int, index: int = 0) -> torch.Tensor:
    return torch.ones(*shape, device=f"cuda:{index}")


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def test_a_tensor_left_on_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        on_device(3) + torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(4, 3) @ on_device(3, 2)
    with pytest.raises(TypeError, match="can't convert cuda"):
        on_device(3).numpy()
    assert torch.equal((on_device(3) * torch.tensor(2.0)).cpu(), torch.full((3,), 2.0))


def test_another_rank_s_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
        on_device(3) + on_device(3, index=1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        on_device(3, index=torch.cuda.device_count())
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(torch.cuda.device_count())
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1
    assert torch.empty(1, device="cuda").device.index == 0


def test_what_makes_the_host_wait_is_counted_with_its_place() -> None:
    x, mask = on_device(8), torch.arange(8, device="cuda") > 3
    for wait in (
        lambda: x.sum().item(),
        lambda: float(x[0]),
        lambda: x.cpu(),
        lambda: x.tolist(),
        lambda: torch.ones(8).to("cuda"),
        lambda: x[mask],
        lambda: mask.nonzero(),
        lambda: torch.equal(x, x),
        lambda: bool(mask.any()),
        torch.cuda.synchronize,
        torch.cuda.current_stream().synchronize,
    ):
        with counted() as counts:
            wait()
        assert counts.synchronizations == 1, (wait, counts)
        (site,) = counts.sites
        assert "test_fake_device.py" in site
    with counted() as counts:
        (x * 2).sum().add_(x.view(2, 4)[0, 0])
        x.index_select(0, torch.arange(3, device="cuda"))
    assert counts.synchronizations == 0 and not counts.sites


def test_operations_bytes_and_memory_are_counted() -> None:
    with counted() as counts:
        x = torch.empty(1000, device="cuda")
        y = x.fill_(1.0).view(10, 100).t()[3:7].unsqueeze(0)  # views launch nothing
        (y + 1).exp_()
    assert counts.operations == 3
    assert counts.peak == 4096 + 512  # 4000 and 160 bytes, as CUDA's allocator rounds them
    with counted() as counts:
        x.copy_(torch.zeros(1000))
        x[:10].cpu()
    assert (counts.to_device, counts.to_host) == (4000, 40)
    before = torch.cuda.memory_allocated()
    z = x + 1
    assert torch.cuda.memory_allocated() - before == 4096
    del z
    assert torch.cuda.memory_allocated() == before


def test_memory_is_not_zero() -> None:
    assert torch.empty(5, device="cuda").isnan().all()
    assert (torch.empty(5, dtype=torch.int64, device="cuda") == -1).all()


def test_a_stream_that_does_not_wait_is_refused(side: torch.cuda.Stream) -> None:
    x, main = on_device(4), torch.cuda.current_stream()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="reads what is written by"):
        x + 1
    with torch.cuda.stream(side):
        side.wait_stream(main)
        y = x + 1
    with pytest.raises(RuntimeError, match="wait_stream or wait_event is missing"):
        y + 1
    event = side.record_event()
    with torch.cuda.stream(side):
        y += 1  # after the event
    main.wait_event(event)
    with pytest.raises(RuntimeError, match="reads what is written by"):
        y + 1
    side.synchronize()  # the host waits, and launches everything later
    assert (y + 1).tolist() == [4.0] * 4


def test_a_stream_that_overwrites_what_another_reads_is_refused(side: torch.cuda.Stream) -> None:
    x = on_device(4)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(RuntimeError, match="overwrites what is read"):
        x.zero_()
    torch.cuda.current_stream().wait_stream(side)
    x.zero_()
    assert y.tolist() == [2.0] * 4


@pytest.mark.parametrize("remedy", [None, "record", "wait"])
def test_a_tensor_freed_under_another_stream_is_found(
    side: torch.cuda.Stream, remedy: str | None
) -> None:
    x = on_device(4)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if remedy == "record":
        x.record_stream(side)
    elif remedy == "wait":
        torch.cuda.current_stream().wait_stream(side)
    del x
    gc.collect()
    if remedy is None:
        with pytest.raises(RuntimeError, match="freed while another stream"):
            native.raise_defect()
    native.raise_defect()
    side.synchronize()
    assert y.sum().item() == 8.0


def test_a_buffer_freed_before_it_is_read_is_found() -> None:
    x = on_device(4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access.*storage of 0 bytes"):
        x + 1
    x.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        x + 1
    x.untyped_storage().resize_(16)
    assert x[2:].isnan().all()  # what came back is not what was there


def test_pinned_memory_is_the_host_s_only_after_a_wait() -> None:
    x, host = on_device(4), torch.zeros(4, pin_memory=True)
    assert host.is_pinned() and not torch.zeros(4).is_pinned()
    with counted() as counts:
        host.copy_(x, non_blocking=True)
        assert host.isnan().all(), "the bytes have not come yet"
    assert counts.synchronizations == 0
    torch.cuda.synchronize()
    assert host.tolist() == [1.0] * 4
    with counted() as counts:  # by way of a buffer of CUDA's own, for which the host waits
        torch.zeros(4).copy_(x, non_blocking=True)
    assert counts.synchronizations == 1

    x.copy_(host, non_blocking=True)
    host.zero_()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="written before its copy"):
        native.raise_defect()


def test_registered_memory_is_given_back_only_after_a_wait() -> None:
    x, host = on_device(4), torch.zeros(4)
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister(host.data_ptr(), 16, 0)
    host.copy_(x, non_blocking=True)
    runtime.cudaHostUnregister(host.data_ptr())
    with pytest.raises(RuntimeError, match="given back before a copy"):
        native.raise_defect()
    torch.cuda.synchronize()
    assert host.tolist() == [1.0] * 4 and not host.is_pinned()


def test_collectives_take_what_their_backend_takes() -> None:
    collectives.start()
    assert dist.get_backend() == "nccl"
    x = on_device(4)
    dist.all_reduce(x)
    assert x.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match="over NCCL: No backend type associated with.* cpu"):
        dist.all_reduce(torch.ones(4))
    with pytest.raises(RuntimeError, match="on cuda:1 by a rank of device 0"):
        dist.all_reduce(on_device(4, index=1))
    with pytest.raises(RuntimeError, match="must be contiguous"):
        dist.all_reduce(on_device(4, 4).t()[:2])
    control = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(4), group=control)
    with pytest.raises(RuntimeError, match="over gloo: No backend type associated with.* cuda"):
        dist.all_reduce(x, group=control)
    collectives.stop()


@pytest.mark.forks
@pytest.mark.parametrize("devices", [[0, 1], [0, 0]])
def test_each_rank_has_a_device_of_its_own(devices: list[int]) -> None:
    def work() -> None:
        collectives.start()
        torch.cuda.set_device(devices[collectives.rank()])
        x = torch.ones(1, device="cuda")
        if devices == [0, 1]:
            dist.all_reduce(x)
            assert x.item() == 2.0
        else:
            with pytest.raises(RuntimeError, match=r"Duplicate GPU detected: .* on \[0, 0\]"):
                dist.all_reduce(x)
        collectives.stop()

    on_ranks(work, 2)


def test_a_collective_runs_on_a_stream_of_its_own(side: torch.cuda.Stream) -> None:
    collectives.start()
    x, buffer = on_device(4), on_device(8)
    with counted() as counts:
        dist.all_reduce(x)
        x.add_(1)  # unless it is asked to go on, the current stream waits, the host never
    assert counts.synchronizations == 0
    work = dist.all_reduce(x, async_op=True)
    buffer + 1
    with pytest.raises(RuntimeError, match="uses what a collective writes"):
        x + 1
    work.wait()
    assert x.tolist() == [2.0] * 4

    work = dist.all_reduce(buffer[:4], async_op=True)
    buffer[4:].add_(1)  # the next bucket is filled meanwhile
    with pytest.raises(RuntimeError, match="uses what a collective writes"):
        buffer[3:5].zero_()
    with torch.cuda.stream(side):
        work.wait()
        side.wait_stream(torch.cuda.default_stream())
        buffer[:4].add_(1)
    with pytest.raises(RuntimeError, match="wait_stream or wait_event is missing"):
        buffer + 1  # one stream has waited, this one has not
    torch.cuda.current_stream().wait_stream(side)
    assert buffer.tolist() == [2.0] * 8

    gathered = torch.empty(4, device="cuda")
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.13's name
    work = gather(gathered, x, async_op=True)
    x + 1
    with pytest.raises(RuntimeError, match="overwrites what a collective reads"):
        x.zero_()
    work.wait()
    x.zero_()
    assert gathered.tolist() == [2.0] * 4
    collectives.stop()


def test_an_fp8_product_without_the_transpose_is_refused() -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    tex = pytest.importorskip("transformer_engine_torch")
    quantizer = te.Float8CurrentScalingQuantizer(
        tex.DType.kFloat8E4M3, device="cuda", rowwise=True, columnwise=False
    )
    x = quantizer(on_device(32, 32).bfloat16())
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    assert general_gemm(x, x, out_dtype=torch.bfloat16)[0].unique().tolist() == [32.0]
    with pytest.raises(RuntimeError, match="transpose of a factor"):
        general_gemm(x, x, out_dtype=torch.bfloat16, layout="NN")
    with pytest.raises(RuntimeError, match="one factor of a product is FP8"):
        general_gemm(x, on_device(32, 32).bfloat16(), out_dtype=torch.bfloat16)
