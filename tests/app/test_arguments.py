"""What a configuration gives a class, by the annotations of the class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import nn

from lightning_ga import UserError
from lightning_ga.app.arguments import arguments_of, check_arguments, described, fits, referred

FIT = [
    (int, 3, True), (int, 3.0, False), (int, True, False), (int, "3", False), (float, 3, True), (float, "fast", False),
    (bool, False, True), (bool, 1, True), (bool, "yes", False), (str, "a", True), (str, 1, False),
    (int | None, None, True),
    (int, None, False), (Sequence[int], [1, 2], True), (Sequence[int], 1, False), (Sequence[str], "abc", False),
    (list[float], [1, "a"], False), (tuple[int, int], [1, 2], True), (Mapping[str, int], {"a": 1}, True),
    (dict, [1], False), (Literal["a", "b"], "c", False), (Literal["a"], "a", True), (Callable[..., Any], "sgd", False),
    (Callable[..., Any], {"_target_": "x.y"}, True), (float | torch.Tensor, "fast", False), (nn.Module, "net", False),
    (torch.device, "cpu", True), (Any, "x", True), (int, "???", True), ("Net", 3, True),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value", "expected"), FIT)
def test_plain_values_fit_annotations(hint, value, expected):
    """Annotations by classes allow anything: a configuration says ``cpu`` for a device."""
    assert fits(value, hint) is expected


def test_annotations_are_told_in_words():
    assert described(int | float | None) == "a number or null"
    assert described(Sequence[int]) == "a list ([VALUE, …], each a whole number)"
    assert described(Literal["a", "b"]) == "a or b"
    assert described(float | torch.Tensor) == "a number"


class Base:
    def __init__(self, net: nn.Module, *, rate: float = 0.1) -> None: ...


class Net(Base):
    def __init__(self, hidden: int, width: int = 3, **others: Any) -> None: ...


class Closed:
    def __init__(self, hidden: int, sizes: Sequence[int] = 5) -> None: ...  # type: ignore[assignment]


def test_arguments_that_are_handed_on_are_those_of_the_base():
    """But for those that the class itself gives it: nobody can set ``net``."""
    known, closed = arguments_of(Net)
    assert ([*known], closed) == (["hidden", "width", "rate"], False)
    assert arguments_of(Closed)[1]
    assert arguments_of(dict) == ({}, False)


HERE = f"{__name__}."


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"hidden": 1, "size": 2},
            "model.size=2: Closed got an unexpected keyword argument 'size'; did you mean sizes?",
        ),
        ({"hidden": "big"}, "model.hidden=big does not fit: Closed takes a whole number as hidden."),
        ({}, "model.hidden is missing, which Closed needs: add +model.hidden=VALUE."),
    ],
)
def test_what_a_failed_class_was_given_is_told(content, sentence):
    """What nobody typed may fit another annotation, so it is told only then."""
    content = {"_target_": f"{HERE}Closed", **content}
    with pytest.raises(UserError) as caught:
        check_arguments("model", content, content, failed=True)
    assert str(caught.value).startswith(sentence)


def test_a_value_of_the_default_s_own_kind_fits():
    """Whatever the annotation says."""
    content = {"_target_": f"{HERE}Closed", "hidden": 1, "sizes": 7}
    check_arguments("model", content, content, failed=True)


def test_a_partial_may_lack_what_it_is_called_with():
    content = {"_target_": f"{HERE}Closed", "_partial_": True}
    check_arguments("model.part", content, content, failed=True)


def test_a_value_is_told_by_the_key_that_it_was_taken_from():
    assert referred("${optimizer.lr}") == "optimizer.lr"
    assert referred("${oc.select:lr_scheduler}") == "lr_scheduler"
    assert referred("${a} ${b}") is None
    raw = {"_target_": f"{HERE}Closed", "hidden": "${data.hidden}"}
    with pytest.raises(UserError, match="data.hidden=big does not fit"):
        check_arguments("model", raw, {**raw, "hidden": "big"}, failed=True)


def test_a_class_that_is_not_there_is_told_with_the_nearest():
    content = {"_target_": "torch.optim.AdamWW"}
    with pytest.raises(
        UserError, match=r"a\._target_=torch\.optim\.AdamWW cannot .* did you mean torch\.optim\.AdamW\?"
    ):
        check_arguments("a", content, content)
