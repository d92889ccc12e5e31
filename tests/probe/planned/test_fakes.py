from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_ga.probe.planned.fakes import Answers, PlainCopies


@contextmanager
def answering() -> Iterator[list[str]]:
    """Tensors have no values; the list holds what was doubted."""
    doubts: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), Answers(doubts.append), PlainCopies():
        yield doubts


def test_scalars_are_one():
    """Of every kind; nothing is doubted for it."""
    with answering() as doubts:
        x = torch.randn(3)
        assert x.sum().item() == 1.0
        assert int(x.argmax()) == 1
        assert complex(torch.complex(x, x)[0]) == 1
        assert x.tolist() == [1.0, 1.0, 1.0]
    assert doubts == []


@pytest.mark.parametrize(
    ("condition", "answer"),
    [
        (lambda x: x.isnan().any(), False),
        (lambda x: x.isinf().any(), False),
        (lambda x: torch.isfinite(x).all(), True),
        (lambda x: torch.isfinite(x.sum()), True),
        (lambda x: ~torch.isfinite(x).all(), False),
        (lambda x: torch.logical_not(torch.isnan(x).any()), True),
        (lambda x: x.sum() > 100, False),
        (lambda x: x.sum() != x.sum(), False),
        (lambda x: (x.sum() > 1) | torch.isfinite(x).all().view(()), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: torch.allclose(x, x), True),
    ],
)
def test_conditions_are_those_of_a_healthy_step(condition: Any, answer: bool):
    """A step that looks for NaN finds none."""
    with answering():
        assert bool(condition(torch.randn(3))) is answer


def test_known_constants_keep_their_value():
    """What a step makes itself is no secret."""
    with answering():
        assert torch.tensor(7).item() == 7


@pytest.mark.parametrize(
    ("select", "shape"),
    [
        (lambda x, m: x[m], (6,)),
        (lambda x, m: x[:, m[0]], (2, 3)),
        (lambda x, m: x.masked_select(m), (6,)),
        (lambda x, m: m.nonzero(), (6, 2)),
        (lambda x, m: torch.where(m)[0], (6,)),
        (lambda x, m: x.unique(), (6,)),
    ],
)
def test_sizes_that_depend_on_values_are_the_largest(select: Any, shape: tuple[int, ...]):
    """And that is said."""
    with answering() as doubts:
        x = torch.randn(2, 3)
        assert tuple(select(x, x > 0).shape) == shape
    assert len(doubts) == 1
    assert "its size depends on values" in doubts[0]


def test_counts_of_known_classes_have_a_known_size():
    """Nothing is doubted."""
    with answering() as doubts:
        assert torch.ones(7, dtype=torch.int64).bincount(minlength=10).shape == (10,)
    assert doubts == []


def test_masks_have_gradients_and_can_be_written_to():
    """The backward pass of a selection, and an assignment."""
    with answering():
        x = torch.randn(4, 3, requires_grad=True)
        x[x > 0].sum().backward()
        assert x.grad.shape == (4, 3)
        y = torch.zeros(4, 3)
        y[y > 0] = 1.0
        y[y > 0] = torch.ones(12)


def test_a_size_that_nothing_bounds_stays_an_error():
    """Rather than a guess."""
    with answering(), pytest.raises(Exception, match="repeat_interleave"):
        torch.repeat_interleave(torch.ones(3), torch.tensor([1, 2, 3]).float().sqrt().long())


def test_operators_of_other_libraries_are_doubted():
    """Only their results are seen."""
    with torch.library._scoped_library("test_fakes", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        with answering() as doubts:
            torch.ops.test_fakes.twice(torch.ones(3))
    assert doubts == ["test_fakes.twice: an operator whose scratch memory is not known"]


def test_copies_are_tensors_without_values():
    """Deep ones too, of constants and of originals, each once."""
    original = torch.ones(3)
    with answering():
        pair = deepcopy([torch.tensor(2.0), original, original])
    assert all(isinstance(copy, FakeTensor) for copy in pair)
    assert pair[1] is pair[2]
