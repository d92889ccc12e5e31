from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_ga.errors import UserError
from lightning_ga.loaders import count_samples, kept_samples
from lightning_ga.sample_axis import batch_samples, read_layout

Pair = namedtuple("Pair", "inputs lengths")


def images(*widths: int, channels: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(channels, 9, width) for width in widths]


def targets(*boxes: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.zeros(number, 4), "labels": torch.zeros(number)} for number in boxes]


UNAMBIGUOUS: dict[str, tuple[Any, int]] = {
    "a tensor": (torch.zeros(8, 5), 8),
    "one sample": ([torch.zeros(1, 5), torch.zeros(1)], 1),
    "a list of one tensor": ([torch.zeros(8, 5)], 8),
    "images and labels": ([torch.zeros(8, 3, 9, 9), torch.zeros(8, dtype=torch.long)], 8),
    "images and masks": ([torch.zeros(8, 3, 9, 9), torch.zeros(8, 1, 9, 9)], 8),
    "two images, two masks": ([torch.zeros(2, 3, 9, 9), torch.zeros(2, 1, 9, 9)], 2),
    "triplets": ([torch.zeros(8, 5), torch.zeros(8, 5), torch.zeros(8, 5)], 8),
    "inputs, targets and a number": ((torch.zeros(8, 5), torch.zeros(8), 0.3), 8),
    "tokens": (dict.fromkeys(("input_ids", "attention_mask", "labels"), torch.zeros(8, 7)), 8),
    "a size": ({"image": torch.zeros(8, 3), "size": (224, 224)}, 8),
    "names": ({"image": torch.zeros(8, 3), "name": list("abcdefgh"), "split": "train"}, 8),
    "texts alone": (list("abcde"), 5),
    "texts and their ids": ((tuple("abcde"), torch.zeros(5)), 5),
    "five captions each, collated": ((torch.zeros(8, 3), [tuple("abcdefgh")] * 5), 8),
    "five captions each": ((torch.zeros(8, 3), [list("abcde")] * 8), 8),
    "detection": ((images(5, 6, 7, 8, 5), targets(4, 2, 9, 1, 1)), 5),
    "detection of two": ((images(5, 6), targets(4, 2)), 2),
    "detection of three": ((images(5, 6, 7), targets(4, 2, 5)), 3),
    "detection of one": ((images(5), targets(1)), 1),
    "zipped detection": ((tuple(images(5, 6)), tuple(targets(4, 2))), 2),
    "detection with labels": ({"images": images(5, 6, 7, 8, 5), "labels": torch.zeros(5)}, 5),
    "two views": (([torch.zeros(8, 5), torch.zeros(8, 5)], torch.zeros(8)), 8),
    "a matrix for all": ({"x": torch.zeros(8, 3), "y": torch.zeros(8), "mix": torch.zeros(3, 3)}, 8),
    "two loaders": ([[torch.zeros(8, 5), torch.zeros(8)], [torch.zeros(8, 5), torch.zeros(8)]], 8),
    "inputs and targets by name": (({"x": torch.zeros(8)}, {"y": torch.zeros(8)}), 8),
    "arrays": ({"x": np.zeros((8, 3)), "name": np.array(list("abcdefgh"))}, 8),
    "nothing": ({"x": torch.zeros(8), "mask": None, "extra": []}, 8),
    "sparse": (torch.eye(8).to_sparse(), 8),
    "a mask": (torch.ones(8, 7, dtype=torch.bool), 8),
    "named": (Pair(torch.zeros(8, 5), torch.zeros(8)), 8),
    "a namespace": (SimpleNamespace(x=torch.zeros(8, 5), y=torch.zeros(8)), 8),
    "packed sequences": (pack_sequence([torch.zeros(2), torch.zeros(5), torch.zeros(3)], enforce_sorted=False), 3),
    "labels in a list": ([torch.zeros(8, 3), [1, 0, 2, 1, 0, 2, 1, 0]], 8),
    "optional masks": ((torch.zeros(5, 3), [None, torch.zeros(9), None, torch.zeros(7), None]), 5),
    "time steps": (([torch.zeros(8, 5)] * 10, torch.zeros(8)), 8),
    "no sample": ([torch.zeros(0, 5), torch.zeros(0)], 0),
}


@pytest.mark.parametrize("name", UNAMBIGUOUS)
def test_samples_are_counted_without_being_told(name: str) -> None:
    """In the structures in which batches come; knowing what to expect changes nothing."""
    batch, count = UNAMBIGUOUS[name]
    assert batch_samples(batch) == count
    assert batch_samples(batch, expected=count) == count
    assert batch_samples(batch, like=read_layout(batch)) == count


@pytest.mark.parametrize("name", [name for name in UNAMBIGUOUS if not name.startswith(("packed", "detection"))])
def test_counts_agree_with_those_of_the_loaders(name: str) -> None:
    """Where those are told what to expect; they do not take a list of tensors for a list of samples."""
    batch, count = UNAMBIGUOUS[name]
    assert count_samples(batch, expected=count) == count


AMBIGUOUS: dict[str, tuple[Any, list[int]]] = {
    "two lengths": ((torch.zeros(8, 5), torch.zeros(10)), [8, 10]),
    "two loaders of their own": ({"a": torch.zeros(8), "b": torch.zeros(4)}, [8, 4]),
    "nodes and graphs": ({"nodes": torch.zeros(40, 16), "y": torch.zeros(4)}, [40, 4]),
    "images alone": (images(5, 6, 7, 8, 9), [5]),
    "samples left alone": ([(image, 1) for image in images(5, 6, 7, 8, 9)], [5]),
    "two inputs of unequal length": ((torch.zeros(8, 5), torch.zeros(10, 5)), [8, 10]),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_batch_is_refused_unless_the_number_is_known(name: str) -> None:
    """The lengths and the way out are named."""
    batch, counts = AMBIGUOUS[name]
    with pytest.raises(UserError, match=r"do not agree on a number \(batch.* has .*define split_batch"):
        batch_samples(batch)
    assert [batch_samples(batch, expected=count) for count in counts] == counts


@pytest.mark.parametrize("batch", [{}, None, 3, "text", {"a": None, "b": torch.tensor(1.0)}])
def test_a_batch_without_samples_is_refused(batch: object) -> None:
    """Nothing in it has a length."""
    with pytest.raises(UserError, match="it has no tensor"):
        batch_samples(batch)


@pytest.mark.parametrize(
    ("batch", "samples", "path"),
    [
        ({"x": torch.zeros(2, 3), "size": (224, 224)}, 2, r"batch\['size'\]"),
        ({"x": torch.zeros(3, 3), "y": torch.zeros(3), "views": images(5, 6, 7)}, 3, r"batch\['views'\]"),
        ([(image, 1) for image in images(5, 6, 7)], 3, "batch"),
        ((torch.zeros(2, 5), torch.zeros(7, 5)), 2, "batch"),
        ({"x": torch.zeros(2, 3), "y": torch.zeros(2), "w": [torch.zeros(5), torch.zeros(5, 5)]}, 2, r"batch\['w'\]"),
    ],
)
def test_a_list_as_long_as_the_batch_is_not_guessed_at(batch: object, samples: int, path: str) -> None:
    """Whether a few things belong to all samples or one to each is asked, not assumed."""
    with pytest.raises(UserError, match=rf"^{path} has {samples} entries in a batch of {samples} samples.*split_batch"):
        read_layout(batch, expected=samples)


@pytest.mark.parametrize(
    ("full", "last"),
    [
        (
            {"x": torch.zeros(8, 5), "size": (224, 224), "mix": torch.zeros(2, 2), "label": (1, 2, 3, 4, 5, 6, 7, 8)},
            {"x": torch.zeros(2, 5), "size": (224, 224), "mix": torch.zeros(2, 2), "label": (1, 2)},
        ),
        ((images(5, 6, 7, 8, 9), torch.zeros(5)), (images(5, 6, 7), torch.zeros(3))),
        ([(image, 1) for image in images(5, 6, 7, 8, 9)], [(image, 1) for image in images(5, 6, 7)]),
        ((torch.zeros(8, 5), torch.zeros(10, 5)), (torch.zeros(2, 5), torch.zeros(10, 5))),
        ({"x": (torch.zeros(8, 5), torch.zeros(10, 5))}, {"x": (torch.zeros(2, 5), torch.zeros(10, 5))}),
        (([torch.zeros(8, 5)] * 2, torch.zeros(8)), ([torch.zeros(2, 5)] * 2, torch.zeros(2))),
    ],
)
def test_a_last_batch_is_read_like_a_full_one(full: Any, last: Any) -> None:
    """By chance its few samples are as many as other things are long."""
    first = read_layout(full, expected=len(full) if isinstance(full, list) else len_of_first(full))
    later = read_layout(last, like=first)
    assert {path: later.roles.get(path) for path in first.roles} == dict(first.roles)
    assert later.samples == (len(last) if isinstance(last, list) else len_of_first(last))


@dataclass
class Shaped:
    x: torch.Tensor
    shape: tuple[int, int]


class Attributes(dict[str, Any]):
    """A mapping whose keys are attributes."""

    __getattr__ = dict.__getitem__


def test_a_field_called_shape_makes_no_array() -> None:
    """Neither of a dataclass nor of a mapping whose keys are attributes."""
    assert batch_samples(Shaped(torch.zeros(8), (5, 5))) == 8
    assert batch_samples(Attributes(x=torch.zeros(8), shape=(5, 5))) == 8


def len_of_first(batch: Any) -> int:
    first = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len_of_first(first) if isinstance(first, tuple) else len(first)


def test_a_part_that_is_no_longer_by_sample_is_refused() -> None:
    """Rather than cut somewhere else."""
    first = read_layout({"x": torch.zeros(8), "y": torch.zeros(8)})
    with pytest.raises(UserError, match=r"batch\['y'\] had one entry for each sample.* now has 3 for 5 samples"):
        read_layout({"x": torch.zeros(5), "y": torch.zeros(3)}, expected=5, like=first)


class Graphs:
    """Something that can be moved, and says nothing of samples."""

    def __init__(self) -> None:
        self.x = torch.zeros(8, 3)

    def to(self, device: object) -> "Graphs":
        return self


@pytest.mark.parametrize("path", ["batch", r"batch\['graphs'\]", r"batch\[1\]"])
def test_an_unknown_type_is_refused(path: str) -> None:
    """With where it is and how it is made known; as one of many samples it needs not be known."""
    batch = {"batch": Graphs(), r"batch\['graphs'\]": {"x": torch.zeros(8), "graphs": Graphs()}}.get(
        path, (torch.zeros(8), Graphs())
    )
    message = rf"^{path} is of the type Graphs.*register_splitter\(Graphs, count=.*or define split_batch"
    with pytest.raises(UserError, match=message):
        read_layout(batch)
    with pytest.raises(UserError, match=r"batch\['few'\]\[0\] is of the type Graphs"):
        read_layout({"x": torch.zeros(8), "few": [Graphs(), Graphs()]}, expected=8)
    assert batch_samples((torch.zeros(8), [Graphs() for _ in range(8)])) == 8


def test_sequences_with_time_first_are_refused() -> None:
    """They would be cut along time; a batch that lost samples on its way is not among these."""
    batch = (torch.zeros(5, 8, 3), torch.zeros(5, 8, 3))
    with pytest.raises(UserError, match=r"8 samples lie along the second axis .* \(5, 8, 3\)"):
        read_layout(batch, expected=8)
    assert read_layout(batch).samples == 5
    assert read_layout(batch, expected=9).samples == 5
    assert [kept_samples(batch, count) for count in (8, 9)] == [8, 5]
    assert read_layout((torch.zeros(8, 8, 3),), expected=8).samples == 8
    assert read_layout((torch.zeros(5, 8), torch.zeros(5)), expected=8).samples == 5
