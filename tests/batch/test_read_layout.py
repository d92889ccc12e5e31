"""Where samples lie is read by collating them as 3 and as 4, or off ready-made batches; else it is refused."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from known_batches import BatchEncoding, Known, same
from torch.nn.utils.rnn import pack_sequence

from lightning_ga.batch.layout import LayoutError, SampleAxis
from lightning_ga.batch.read_layout import read_layout, read_ready_made

Collate = Callable[[list[Any]], Any]
REMEDY = r"define split_batch\(self, batch, sizes\) on the LightningModule"


def sample(number: int, length: int = 5) -> dict[str, Any]:
    return {"x": torch.arange(length * 2.0).reshape(length, 2) + 10 * number, "y": torch.tensor(number), "name": "n"}


SAMPLES = [sample(number) for number in (1, 2)]
RAGGED = [sample(number, length) for number, length in ((1, 5), (2, 3), (3, 4))]


def read(collate: Collate, samples: Sequence[Any] = SAMPLES) -> dict[str, Any]:
    return dict(read_layout(Known(samples, collate)).roles)


def xs(batch: list[Any]) -> torch.Tensor:
    return torch.stack([each["x"] for each in batch])


def ys(batch: list[Any]) -> torch.Tensor:
    return torch.stack([each["y"] for each in batch])


PACKED: dict[str, tuple[Collate, str]] = {
    "rows of all samples": (
        lambda batch: (torch.cat([each["x"] for each in batch]), ys(batch)),
        r"batch\[0\] goes from the shape \(15, 2\) to \(20, 2\) when 3 samples become 4",
    ),
    "ends": (
        lambda batch: (xs(batch), torch.tensor([5] * len(batch)).cumsum(0)),
        r"batch\[1\] depends on where in the batch a sample is",
    ),
    "a sum": (
        lambda batch: (xs(batch), xs(batch).sum(0)),
        r"batch\[1\] depends on where in the batch a sample is, or on how many there are",
    ),
    "one over their number": (
        lambda batch: (xs(batch), 1 / len(batch)),
        r"batch\[1\] depends on where in the batch a sample is, or on how many there are",
    ),
    "a key for each sample": (
        lambda batch: {place: each["x"] for place, each in enumerate(batch)},
        "batch has other fields when 3 samples become 4",
    ),
    "another number of axes": (
        lambda batch: torch.zeros((1,) * len(batch)),
        r"batch goes from the shape \(1, 1, 1\) to \(1, 1, 1, 1\) when 3 samples become 4",
    ),
    "nothing by sample": (lambda batch: {"weights": torch.ones(3), "name": "train"}, "nothing in it grows with them"),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_cannot_be_cut_is_refused_with_the_part_and_the_way_out(name: str) -> None:
    collate, message = PACKED[name]
    with pytest.raises(LayoutError, match=rf"The batch cannot be cut into samples, as {message}.*{REMEDY}"):
        read(collate)


class Unknown:
    """Something that says nothing of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self.x = xs(samples)


def test_an_unknown_type_is_refused() -> None:
    """With where it is, and how it is made known; if it is the same in each batch, it is shared."""
    message = r"batch\['graphs'\] is of the type Unknown.*register_splitter\(Unknown, count=.*or define split_batch"
    with pytest.raises(LayoutError, match=message):
        read(lambda batch: {"x": xs(batch), "graphs": Unknown(batch)})
    with pytest.raises(LayoutError, match=r"batch\[1\] is of the type Unknown.*register_splitter"):
        read_ready_made((torch.zeros(8), Unknown(SAMPLES)))
    vocabulary = object()
    assert read(lambda batch: {"x": xs(batch), "vocabulary": vocabulary})["batch['vocabulary']"] == "shared"
    assert read(lambda batch: [Unknown([each]) for each in batch])["batch"] == SampleAxis(0)


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    shape: tuple[int, int] = (5, 5)


STRUCTURES: dict[str, Collate] = {
    "dataclass with a field called shape": lambda batch: Record(xs(batch)),
    "encoding": lambda batch: BatchEncoding({"ids": xs(batch)}, [each["name"] for each in batch], 1),
    "array of texts": lambda batch: np.array([each["name"] for each in batch]),
    "sparse": lambda batch: xs(batch).to_sparse(),
    "nested": lambda batch: torch.nested.nested_tensor([each["x"] for each in batch], layout=torch.jagged),
    "nested, strided": lambda batch: torch.nested.nested_tensor([each["x"] for each in batch]),
    "packed sequences in order": lambda batch: pack_sequence([each["x"] for each in batch]),
    "five captions each, collated": lambda batch: [tuple(each["name"] for each in batch) for _ in range(5)],
}
OF_UNLIKE_LENGTHS = ("nested", "nested, strided")


def dense(value: Any) -> Any:
    """What can be compared."""
    if isinstance(value, torch.Tensor):
        return list(value.unbind()) if value.is_nested else value.to_dense()
    return value


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_structures_in_which_batches_come_are_cut(name: str) -> None:
    """As if fewer samples had been collated."""
    collate = STRUCTURES[name]
    samples = RAGGED if name in OF_UNLIKE_LENGTHS else [*SAMPLES, sample(3)]
    batch, layout = collate(samples), read_layout(Known(samples, collate))
    assert layout.samples(batch) == 3
    assert same(dense(layout.cut(batch, 1, 3)), dense(collate(samples[1:])))


def test_samples_of_several_loaders_that_a_hook_joins_are_refused() -> None:
    with pytest.raises(LayoutError, match="batch goes from the shape|batch contains samples of several loaders"):
        read_layout(Known(SAMPLES, xs, xs, join=torch.cat))
    with pytest.raises(LayoutError, match="nothing in it grows"):
        read_layout(Known(SAMPLES, xs, xs, join=lambda batches: batches[0]))


def test_samples_of_ready_made_batches_lie_on_the_first_axis() -> None:
    """Of all parts but constants; lists of numbers are no samples, and parts of another length make it unreadable."""
    batch = {"x": torch.zeros(8, 3), "names": list("abcdefgh"), "scale": 0.5, "t": torch.tensor(2.0), "none": None}
    layout = read_ready_made(batch)
    assert layout.samples(batch) == 8
    part = layout.cut(batch, 2, 5)
    assert (part["x"].shape, part["names"], part["scale"]) == ((3, 3), ["c", "d", "e"], 0.5)
    first_axis = "define split_batch.* It comes ready-made, so samples should lie on the first axis of each part"
    for others, lengths in (({"w": torch.zeros(5)}, (8, 5)), ({"x": torch.zeros(3, 8), "y": torch.zeros(8)}, (3, 8))):
        with pytest.raises(LayoutError, match=f"has {lengths[0]} of them and .* has {lengths[1]}: {first_axis}"):
            read_ready_made({**batch, **others})
    message = r"the numbers in batch\['size'\] may belong to all samples or to each: define split"
    with pytest.raises(LayoutError, match=message):
        read_ready_made({**batch, "size": [224] * 8})
    with pytest.raises(LayoutError, match=f"nothing in it grows with them: {first_axis}"):
        read_ready_made({"scale": 0.5})


def test_random_collate_functions_are_read() -> None:
    """Augmentation and noise change values, not shapes; what changes every time needs no check of values."""
    roles = read(
        lambda batch: {"x": xs(batch) + torch.rand(()), "mix": torch.rand(3), "y": ys(batch), "p": random.random()}
    )
    assert roles == {
        "batch": "fields",
        "batch['x']": SampleAxis(0),
        "batch['mix']": "shared",
        "batch['y']": SampleAxis(0),
        "batch['p']": "constant",
    }
