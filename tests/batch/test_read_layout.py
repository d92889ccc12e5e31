"""Where samples lie is read by collating them as 3 and as 4, or off ready-made batches; else it is refused."""

import random
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from known_batches import BatchEncoding, Known
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from lightning_ga.batch.layout import LayoutError, SampleAxis, SampleCount, slices_of
from lightning_ga.batch.read_layout import read_layout, read_ready_made

Pair = namedtuple("Pair", "inputs labels")
Collate = Callable[[list[Any]], Any]
WAY_OUT = r"define split_batch\(self, batch, sizes\) on the LightningModule"


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


def test_samples_lie_where_a_batch_of_four_is_longer_than_one_of_three() -> None:
    """Along any axis, in lists and tuples of texts or tensors too; all else is shared."""
    assert read(default_collate) == {
        "batch": "fields",
        "batch['x']": SampleAxis(0),
        "batch['y']": SampleAxis(0),
        "batch['name']": SampleAxis(0),
    }
    assert read(lambda batch: xs(batch).transpose(0, 1)) == {"batch": SampleAxis(1)}
    assert read(lambda batch: xs(batch).movedim(0, 2)) == {"batch": SampleAxis(2)}
    assert read(lambda batch: [each["x"] for each in batch], RAGGED) == {"batch": SampleAxis(0)}
    assert read(lambda batch: batch, RAGGED) == {"batch": SampleAxis(0)}
    assert read(lambda batch: xs(batch).numpy()) == {"batch": SampleAxis(0)}


PACKED: dict[str, tuple[Collate, str]] = {
    "rows of all samples": (
        lambda batch: (torch.cat([each["x"] for each in batch]), ys(batch)),
        r"batch\[0\] holds 5 entries for each sample, and other parts hold fewer",
    ),
    "rows of unequal numbers": (
        lambda batch: torch.cat([each["x"] for each in batch]),
        "batch holds different numbers of entries for different samples",
    ),
    "cumulative lengths": (
        lambda batch: (xs(batch), torch.tensor([0] + [5] * len(batch)).cumsum(0)),
        r"batch\[1\] goes from the shape \(4,\) to \(5,\) when 3 samples become 4",
    ),
    "ends": (
        lambda batch: (xs(batch), torch.tensor([5] * len(batch)).cumsum(0)),
        r"batch\[1\] depends on where in the batch a sample is",
    ),
    "places": (
        lambda batch: (xs(batch), torch.arange(len(batch))),
        r"batch\[1\] depends on where in the batch a sample is",
    ),
    "views, one after the other": (
        lambda batch: torch.cat([xs(batch), xs(batch) + 1]),
        "batch depends on where in the batch a sample is",
    ),
    "a matrix of pairs": (
        lambda batch: (xs(batch), torch.eye(len(batch))),
        r"batch\[1\] goes from the shape \(3, 3\) to \(4, 4\)",
    ),
    "a sum": (
        lambda batch: (xs(batch), xs(batch).sum(0)),
        r"batch\[1\] changes with the number of samples, though its shape does not",
    ),
    "one over their number": (
        lambda batch: (xs(batch), 1 / len(batch)),
        r"batch\[1\] goes from 0\.33\d* to 0\.25 when 3 samples become 4",
    ),
    "a key for each sample": (
        lambda batch: {place: each["x"] for place, each in enumerate(batch)},
        "batch has other fields when 3 samples become 4",
    ),
    "another number of axes": (
        lambda batch: torch.zeros((1,) * len(batch)),
        "batch changes its shape in a way of its own",
    ),
    "the order of the samples": (
        lambda batch: (xs(batch), torch.tensor([len(each["x"]) for each in batch]).argsort(stable=True)),
        r"batch\[1\] depends on where",
    ),
    "every second sample": (
        lambda batch: {"x": xs(batch), "anchors": xs(batch[::2])},
        r"batch\['anchors'\] changes with the number of samples|batch\['anchors'\]",
    ),
    "nothing by sample": (lambda batch: {"weights": torch.ones(3), "name": "train"}, "nothing in it grows with them"),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_cannot_be_cut_is_refused_with_the_part_and_the_way_out(name: str) -> None:
    collate, message = PACKED[name]
    with pytest.raises(LayoutError, match=rf"The batch cannot be cut into samples, as {message}.*{WAY_OUT}"):
        read(collate, RAGGED if "unequal" in name else SAMPLES)


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
        read_ready_made([(torch.zeros(8), Unknown(SAMPLES))])
    vocabulary = object()
    assert read(lambda batch: {"x": xs(batch), "vocabulary": vocabulary})["batch['vocabulary']"] == "shared"
    assert read(lambda batch: [Unknown([each]) for each in batch])["batch"] == SampleAxis(0)


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    shape: tuple[int, int] = (5, 5)


STRUCTURES: dict[str, tuple[Collate, dict[str, Any]]] = {
    "named tuple": (
        lambda batch: Pair(xs(batch), ys(batch)),
        {"batch": "fields", "batch.inputs": SampleAxis(0), "batch.labels": SampleAxis(0)},
    ),
    "dataclass with a field called shape": (
        lambda batch: Record(xs(batch)),
        {
            "batch": "fields",
            "batch.x": SampleAxis(0),
            "batch.shape": "fields",
            "batch.shape[0]": "constant",
            "batch.shape[1]": "constant",
        },
    ),
    "namespace": (lambda batch: SimpleNamespace(x=xs(batch)), {"batch": "fields", "batch.x": SampleAxis(0)}),
    "encoding": (
        lambda batch: BatchEncoding({"ids": xs(batch)}, [each["name"] for each in batch], 1),
        {
            "batch": "fields",
            "batch.data": "fields",
            "batch.data['ids']": SampleAxis(0),
            "batch._encodings": SampleAxis(0),
            "batch._n_sequences": "constant",
        },
    ),
    "array of texts": (lambda batch: np.array([each["name"] for each in batch]), {"batch": SampleAxis(0)}),
    "sparse": (lambda batch: xs(batch).to_sparse(), {"batch": SampleAxis(0)}),
    "nested": (
        lambda batch: torch.nested.nested_tensor([each["x"] for each in batch], layout=torch.jagged),
        {"batch": SampleAxis(0)},
    ),
    "packed sequences": (
        lambda batch: pack_sequence([each["x"] for each in batch], enforce_sorted=False),
        {"batch": SampleAxis(0)},
    ),
    "five captions each, collated": (
        lambda batch: [tuple(each["name"] for each in batch) for _ in range(5)],
        {"batch": "fields", **{f"batch[{place}]": SampleAxis(0) for place in range(5)}},
    ),
    "three views": (
        lambda batch: [xs(batch)] * 3,
        {"batch": "fields", **{f"batch[{place}]": SampleAxis(0) for place in range(3)}},
    ),
    "targets of detection": (
        lambda batch: ([each["x"] for each in batch], [{"boxes": each["x"]} for each in batch]),
        {"batch": "fields", "batch[0]": SampleAxis(0), "batch[1]": SampleAxis(0)},
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_structures_in_which_batches_come_are_read(name: str) -> None:
    collate, roles = STRUCTURES[name]
    ragged = name in ("nested", "packed sequences", "targets of detection")
    assert read(collate, RAGGED if ragged else SAMPLES) == roles


def test_samples_of_several_loaders_that_a_hook_joins_are_refused() -> None:
    with pytest.raises(LayoutError, match="batch goes from the shape|batch holds samples of several loaders"):
        read_layout(Known(SAMPLES, xs, xs, join=torch.cat))
    with pytest.raises(LayoutError, match="nothing in it grows"):
        read_layout(Known(SAMPLES, xs, xs, join=lambda batches: batches[0]))


def ready(*batches: Any) -> dict[str, Any]:
    return dict(read_ready_made(batches).roles)


@pytest.mark.parametrize("wrap", [int, float, torch.tensor, np.int64])
def test_a_number_that_counts_the_samples_is_cut_with_them(wrap: Callable[[int], Any]) -> None:
    """As a number or a tensor."""
    layout = read_layout(Known(SAMPLES, lambda batch: [xs(batch), wrap(len(batch))]))
    assert layout.roles["batch[1]"] == SampleCount()
    batch = [torch.zeros(8, 5, 2), wrap(8)]
    ours = slices_of(batch, layout).take(2, 5)[1]
    assert (type(ours), ours) == (type(wrap(3)), 3)


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
    with pytest.raises(LayoutError, match="batch holds 2 entries for each sample that change every time"):
        read(lambda batch: torch.rand(2 * len(batch)))
