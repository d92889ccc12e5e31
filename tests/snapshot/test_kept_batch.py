"""A kept batch shows what a step has changed in place, and puts small tensors of inference mode back."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_ga.snapshot import kept_batch
from lightning_ga.snapshot.copies import SMALL
from lightning_ga.snapshot.kept_batch import KeptBatch, undo
from lightning_ga.snapshot.window_savepoint import Savepoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]
LARGE = 7 * 1021 + 5  # elements: some more than a whole number of rows of a fingerprint


class Evaluated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("count", torch.tensor(0))


def counted(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


KINDS: dict[str, Callable[[], Tensor]] = {
    "float": lambda: counted(LARGE),
    "half, odd": lambda: torch.linspace(1, 2, LARGE).half(),
    "bool": lambda: torch.arange(LARGE) % 3 == 0,
    "bytes": lambda: (torch.arange(LARGE) % 251).to(torch.uint8),
    "complex": lambda: torch.complex(counted(LARGE), -counted(LARGE)),
    "number": lambda: torch.tensor(2.0),
    "short": lambda: counted(3, 5),
    "channels last": lambda: counted(4, 3, 20, 30).to(memory_format=torch.channels_last),
    "with gaps": lambda: counted(40, 50, 3)[:, 1:49, 1],
    "not aligned": lambda: torch.arange(LARGE, dtype=torch.int16)[1:],
    "expanded": lambda: counted(50, 1, 40).expand(50, 9, 40),
    "sparse": lambda: torch.eye(9).to_sparse(),
    "sparse rows": lambda: torch.eye(9).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([counted(3, 2), counted(5, 2)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([counted(3, 2), counted(5, 2)]),
    "empty": lambda: torch.empty(0, 3),
}


def values_of(tensor: Tensor) -> Tensor:
    """The values of a tensor of any layout: writing to them writes to the tensor."""
    if tensor.is_nested:
        return tensor.unbind()[-1]
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout is torch.sparse_csr:
        return tensor.values()
    return tensor[:, 0] if tensor.dim() == 3 and 0 in tensor.stride() else tensor


def change(tensor: Tensor) -> None:
    """Change one value, the last."""
    values = values_of(tensor)
    last = values[(-1,) * values.dim()]
    last.copy_(~last if values.dtype is torch.bool else last + 1)


@pytest.mark.parametrize("small", [True, False], ids=["copied", "watched"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_a_tensor_without_versions(kind: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is put back; of a large one it is known that it has changed, or that it has not."""
    if not small:
        monkeypatch.setattr(kept_batch, "SMALL", -1)
    with torch.inference_mode():
        tensor = KINDS[kind]()
        kept = KeptBatch({"inputs": [tensor]})
        before = values_of(tensor).clone()
        assert not kept.changed()
        if tensor.is_nested or tensor.numel():
            change(tensor)
            assert kept.changed() is not small
        kept.restore()
        assert torch.equal(values_of(tensor), before) is (small or kind == "empty")


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty"])
def test_tensors_count_how_often_they_are_written_to(kind: str, inference_mode: bool) -> None:
    """Such a batch comes ready-made, or from a loader outside of inference mode; nothing is copied."""
    tensor = KINDS[kind]()
    with torch.inference_mode(inference_mode):
        kept = KeptBatch((tensor,))
        tensor.sum() if not tensor.is_nested else tensor.unbind()
        assert not kept.changed()
        change(tensor)
        assert kept.changed()
        kept.restore()
        assert kept.changed()


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.flip(0),
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x[torch.randperm(len(x))],
        lambda x: -x,
    ],
    ids=["samples reversed", "features reversed", "rolled", "samples shuffled", "negated"],
)
@pytest.mark.parametrize("features", [1000, 1024, 3072])
def test_a_fingerprint_shows_values_that_change_places(
    move: Callable[[Tensor], Tensor], features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sum is the same. Half of the values are negative, so that the sum of all signs is the same, too."""
    monkeypatch.setattr(kept_batch, "SMALL", 0)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(1)
        half = torch.randn(16, features // 2)
        tensor = torch.cat([half, -half], 1)
        kept = KeptBatch(tensor)
        tensor.copy_(move(tensor))
        assert kept.changed()


def test_what_is_small_is_put_back_beside_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest are copied as long as there is room for them, in all."""
    monkeypatch.setattr(kept_batch, "SMALL", 100)
    with torch.inference_mode():
        batch = {"inputs": counted(300), "labels": counted(10), "weights": counted(12), "again": counted(16)}
        batch["view"] = batch["labels"][2:4]
        kept = KeptBatch(batch)
        batch["labels"].zero_()
        batch["weights"].zero_()
        kept.restore()
        assert torch.equal(batch["labels"], counted(10))
        assert torch.equal(batch["view"], counted(10)[2:4])
        assert torch.equal(batch["weights"], counted(12))
        assert not kept.changed()
        batch["again"].zero_()
        kept.restore()
        assert kept.changed()


def test_containers_are_its_own() -> None:
    """A step may pop labels; tensors are shared, not copied."""

    class Bag:
        def __init__(self) -> None:
            self.rows, self.extra = counted(3), {"labels": counted(2)}

    batch: dict[str, Any] = {"inputs": counted(2), "bag": Bag(), "pair": [counted(1), "text"]}
    kept = KeptBatch(batch)
    inputs, rows = batch.pop("inputs"), batch["bag"].rows
    batch["pair"].clear()
    batch["bag"].extra.clear()
    batch["bag"].rows = None
    assert kept.batch["inputs"] is inputs
    assert kept.batch["bag"].rows is rows
    assert kept.batch["bag"].extra["labels"].tolist() == [1.0, 2.0]
    assert kept.batch["pair"][1] == "text"
    assert not kept.changed()
    rows.zero_()
    assert kept.changed()


def test_a_large_batch_is_kept_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read off it until an error asks whether it has changed."""
    read: list[str] = []
    with torch.inference_mode():
        rows = torch.zeros(SMALL, dtype=torch.float32)
    with monkeypatch.context() as patched:
        for name in ("tolist", "item", "__bool__", "cpu"):
            patched.setattr(Tensor, name, lambda *_, name=name: read.append(name))
        kept = KeptBatch(rows)
    assert not read
    assert not kept.changed()
    with torch.inference_mode():
        rows[-1] = 1
    assert kept.changed()


def test_what_cannot_be_undone_is_said() -> None:
    """A weight by its name, or a batch; everything else is put back."""
    module: Any = Evaluated()
    savepoint = Savepoint(module, dict)
    savepoint.take()
    inputs = counted(3)
    kept = KeptBatch(inputs)
    module.count += 1
    assert undo(savepoint, [kept]) is None
    assert int(module.count) == 0
    inputs += 1
    assert undo(savepoint, [KeptBatch(counted(2)), kept]) == (
        "a tensor of its batch in place, or the loader had, and the batch cannot be read again"
    )
    with torch.no_grad():
        module.layer.weight += 1
    assert undo(savepoint, []) == "layer.weight, of which no copy is kept"


@pytest.mark.parametrize("size", [3, SMALL])
def test_memory_that_is_not_torchs_own_may_be_filled_again(size: int) -> None:
    """A loader that collates into one NumPy buffer raises no version."""
    buffer = np.zeros(size)
    kept = KeptBatch({"rows": torch.from_numpy(buffer)})
    assert not kept.changed()
    buffer += 1
    assert kept.changed()
