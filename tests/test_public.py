"""The public surface: names, signature, and what importing it costs."""

import inspect
import tomllib
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import pytorch_lightning
import torch
from packaging.requirements import Requirement

import lightning_ga
from lightning_ga import AutoAccumulate, UserError


def test_every_public_name_is_there() -> None:
    for name in lightning_ga.__all__:
        assert getattr(lightning_ga, name).__name__ == name
    for name in ("audit", "counters", "data", "models", "report", "schedule", "split", "testing", "train", "weights"):
        assert lightning_ga.__getattr__(name).__name__ == f"lightning_ga.{name}"
        assert name in dir(lightning_ga)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_ga.nothing  # noqa: B018


def test_the_signature_is_the_one_that_others_write_against() -> None:
    """Names, order and defaults."""
    parameters = inspect.signature(AutoAccumulate).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "effective_batch_size": None,
        "accumulate": None,
        "micro_batch_size": "auto",
        "max_micro_batch_size": None,
        "micro_batch_multiple": 1,
        "shares": "equal",
        "objective": "memory",
        "memory_budget": None,
        "normalize": "samples",
        "micro_batching": "loader",
        "on_oom": "split",
        "batch_norm": "warn",
        "whole": (),
        "size_of": None,
        "checkpoint": None,
        "scale_lr": "none",
        "verify": True,
        "cache": True,
    }
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "effective_batch_size")
    with pytest.raises(TypeError, match="unexpected keyword argument 'effective'"):
        AutoAccumulate(effective=8)


def test_it_is_a_callback_of_both_namespaces() -> None:
    assert isinstance(AutoAccumulate(), (pl.Callback))
    assert isinstance(AutoAccumulate(), (pytorch_lightning.Callback))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"effective_batch_size": 0}, "effective_batch_size=0 must be at least 1"),
        ({"effective_batch_size": 2.5}, "effective_batch_size=2.5 must be a whole number"),
        ({"effective_batch_size": 8, "accumulate": 2}, "exclude each other"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"effective_batch_size": {1: 0}}, r"effective_batch_size\[1\]=0 must be at least 1"),
        ({"micro_batch_size": "big"}, """micro_batch_size='big' must be a whole number of at least 1, or "auto"."""),
        ({"max_micro_batch_size": -3}, "max_micro_batch_size=-3 must be at least 1"),
        ({"memory_budget": "much"}, "memory_budget='much'"),
        ({"memory_budget": 16}, "memory_budget=16 is a number of bytes: write memory_budget='16GiB'"),
        ({"effective_batch_size": lambda: 32}, r"with the arguments \(\), and it is called with the epoch alone"),
        ({"objective": "speed"}, "objective='speed' must be one of 'memory', 'throughput'"),
        ({"normalize": "tokens"}, "normalize='tokens'"),
        ({"normalize": np.ones(2)}, "normalize=array"),
        ({"normalize": lambda: 5}, r"normalize is a function with the arguments \(\), and it is called with the batch"),
        ({"micro_batch_size": np.ones(2)}, "micro_batch_size=array.* must be a whole number"),
        ({"verify": np.ones(2)}, "verify=array.* must be one of True, False"),
        ({"objective": torch.ones(2)}, "objective=tensor.* must be one of 'memory'"),
        ({"on_oom": "pray"}, "on_oom='pray' must be one of"),
        ({"batch_norm": "freeze"}, "batch_norm='freeze' must be one of 'warn', 'ignore'"),
        ({"effective_batch_size": "65536 tokens"}, "='65536 tokens' must be a whole number"),
        ({"objective": "throughput", "whole": "net"}, "whole=.* and objective='throughput' do not go together"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AutoAccumulate(**arguments)


def test_its_text_shows_the_arguments_that_were_given() -> None:
    assert repr(AutoAccumulate()) == "AutoAccumulate()"
    assert repr(AutoAccumulate(64, cache=False)) == "AutoAccumulate(effective_batch_size=64, cache=False)"
    for chosen in ({"objective": "throughput"}, {"micro_batching": "step"}, {"on_oom": "raise"}):
        assert next(iter(chosen.values())) in repr(AutoAccumulate(**chosen))


def test_whole_numbers_are_taken_of_whatever_type_they_are() -> None:
    """Numpy's, and floats without a fraction such as 1e3, which YAML and argument parsers make."""
    for thousand in (np.int64(1000), np.uint16(1000), 1e3, np.float64(1000)):
        assert lightning_ga.plan_accumulation(thousand, micro_batch=thousand) == lightning_ga.plan_accumulation(
            1000, micro_batch=1000
        )
        AutoAccumulate(thousand, micro_batch_size=thousand, max_micro_batch_size=thousand)
        AutoAccumulate({0: thousand})
    for wrong in (True, 1.5, "8", None, np.array([1, 2]), float("nan"), float("inf")):
        with pytest.raises(UserError, match="must be a whole number"):
            lightning_ga.plan_accumulation(8, micro_batch=wrong)


def test_the_oldest_packages_are_those_that_are_admitted() -> None:
    root = Path(__file__).parents[1]
    lines = (root / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if "==" in line)
    for line in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]:
        admitted = Requirement(line)
        (least,) = [each.version for each in admitted.specifier if each.operator == ">="]
        assert f"{oldest[admitted.name]}.".startswith(f"{least}."), line
