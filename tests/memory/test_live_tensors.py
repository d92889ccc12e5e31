"""The meter of live tensors: what counts, when it dies, and that values are untouched."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ga.memory.live_tensors import LiveTensorMeter, uncounted
from lightning_ga.memory.step_recorder import StepRecorder
from lightning_ga.probe.training import ProbedTraining

FROZEN = nn.Parameter(torch.zeros(50), requires_grad=False)
GRADED = nn.Linear(10, 5, bias=False)
GRADED.weight.grad = torch.zeros(5, 10)


def test_a_storage_counts_from_creation_until_it_dies() -> None:
    with LiveTensorMeter() as memory:
        first = torch.zeros(100)
        assert memory.live_bytes == 400
        second = first + 1
        assert memory.live_bytes == 800
        del first, second
        assert (memory.live_bytes, memory.peak_bytes) == (0, 800)


class Guarded(TorchDispatchMode):
    """Does not say that it needs no guard."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_no_guard_against_the_compiler_runs_around_each_operation() -> None:
    """PyTorch puts it around the method of a mode unless the class says no, by a private method."""
    assert hasattr(Guarded.__torch_dispatch__, "__wrapped__")
    assert not hasattr(LiveTensorMeter.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize(
    ("settings", "make", "live"),
    [
        ({}, lambda: torch.tensor([1.0, 2.0, 3.0]), 12),
        ({}, lambda: torch._foreach_norm([FROZEN]), 200 + 4),
        ({}, lambda: GRADED(torch.zeros(2, 10)), 80 + 200 + 200 + 40),
        ({}, lambda: torch.zeros(10, device="meta"), 0),
        ({"device": "cpu"}, lambda: torch.zeros(10), 40),
        ({"device": "cuda"}, lambda: torch.zeros(10), 0),
        ({"rounding": 512}, lambda: [torch.zeros(1), torch.zeros(129), torch.zeros(0)], 512 + 1024),
    ],
    ids=[
        "from Python values",
        "a frozen parameter",
        "a parameter and its gradient",
        "meta",
        "on the device",
        "on another device",
        "rounded up",
    ],
)
def test_what_counts(settings: dict[str, Any], make: Callable[[], Any], live: int) -> None:
    with LiveTensorMeter(**settings) as memory:
        kept = make()
        assert memory.live_bytes == live
    del kept


def test_resident_tensors_count_once_until_they_die() -> None:
    tensor = torch.zeros(100)
    memory = LiveTensorMeter()
    memory.add([tensor, None, tensor[:10], torch.zeros(5, device="meta")])
    memory.add([tensor])
    assert (memory.live_bytes, memory.peak_bytes) == (400, 400)
    del tensor
    assert memory.live_bytes == 0


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_sparse_gradients_that_accumulate_count_in_full(passes: int) -> None:
    embedding = nn.Embedding(1000, 4, sparse=True)
    with LiveTensorMeter() as memory:
        for step in range(passes):
            embedding(torch.arange(10 * step, 10 * step + 10)).sum().backward()
        assert memory.live_bytes == embedding.weight.nbytes + passes * 10 * (8 + 4 * 4)


@pytest.mark.filterwarnings("ignore:Sparse (invariant|CSR):UserWarning")
@pytest.mark.filterwarnings("ignore:torch.*quantize:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_a_storage_of_their_own_do_not_break_it() -> None:
    with LiveTensorMeter() as memory:
        dense = torch.eye(20)
        coo = dense.to_sparse()
        assert memory.live_bytes == 1600 + 20 * (2 * 8 + 4)
        kept = [coo.coalesce(), coo @ dense, dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_mkldnn()]
        kept.append(torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)], layout=torch.jagged))
        kept.append(torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)]))
        embedding = nn.Embedding(10, 4, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()
        torch.optim.SparseAdam(embedding.parameters()).step()
        kept.append(nn.Parameter(coo))
        kept[-1] * 2
    assert memory.peak_bytes >= 1600
    del kept, coo, dense, embedding
    gc.collect()
    assert memory.live_bytes == 0


def test_a_budget_is_exact_to_the_byte_and_the_refused_bytes_are_freed() -> None:
    with LiveTensorMeter(budget=800) as memory:
        first = torch.zeros(100)
        second = torch.zeros(100)
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 1 bytes: 801 bytes would be alive.* 800 bytes"):
            torch.zeros(1, dtype=torch.uint8)
    assert (memory.live_bytes, memory.peak_bytes, memory.wanted_bytes) == (800, 800, 801)
    del first, second


def test_the_trace_is_the_stream_with_resident_storages_first() -> None:
    resident, dying = torch.zeros(100), torch.zeros(10)
    training = ProbedTraining()
    memory = StepRecorder(training.owned)
    memory.add([resident, dying])
    memory.start()
    with memory:
        made = torch.zeros(2)
        del dying
        kept = made + 1
        del made
    trace, _ = memory.recorded(2)
    assert trace.sizes == (400, 8, 40, 8)
    assert trace.events == (0, 2, 1, ~2, 3, ~1)
    assert trace.peak() == memory.peak_bytes == 448
    del kept


def test_what_is_made_on_the_host_never_counts() -> None:
    with LiveTensorMeter() as memory:
        with uncounted():
            snapshot = torch.zeros(100).clone()
        copied = snapshot * 1
        assert memory.live_bytes == copied.nbytes


def test_a_resize_in_place_replaces_the_storage() -> None:
    with LiveTensorMeter() as memory:
        tensor = torch.zeros(10)
        out = torch.empty(0)
        tensor.resize_(100)
        assert (memory.live_bytes, memory.peak_bytes) == (400, 440)
        torch.add(tensor, 1, out=out)
        assert memory.live_bytes == 800
        del tensor, out
    assert memory.live_bytes == 0
