"""Whether an out-of-memory error may lead to a retry on ranks: a table of facts, without processes."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ga.compat.ranks import checkpoints_itself, obstacle

SYNC = "SyncBatchNorm layers let ranks wait for each other in forward passes"
OWN = "Strategy exchanges gradients in a way of its own"
SHARDS = "FSDPStrategy shards the model over ranks"


class Strategy:
    """A strategy of another package's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class FSDPStrategy(Strategy):
    """Known by its name."""


def wrapped(*layers: nn.Module, **attributes: Any) -> DistributedDataParallel:
    """A module as ``DistributedDataParallel`` holds it, without a group."""
    module = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(module)
    module.module = nn.Sequential(*layers)
    for name, value in {"static_graph": False, "_comm_hooks": [], "mixed_precision": None, **attributes}.items():
        setattr(module, name, value)
    return module


def named_alike() -> nn.Module:
    """A module that is called in no exchange, with an attribute of a name that is also one of DDP's."""
    module = nn.Linear(1, 1)
    module.mixed_precision = True  # type: ignore[assignment]
    return module


def trainer(model: nn.Module, world_size: int = 2, strategy: type[Strategy] = Strategy) -> Any:
    return SimpleNamespace(world_size=world_size, strategy=strategy(model), callbacks=[])


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (trainer(nn.Linear(1, 1), 1), None),
        (trainer(nn.SyncBatchNorm(1), 1), None),
        (trainer(named_alike(), 1), None),
        (trainer(wrapped()), None),
        (trainer(wrapped(), 1), None),
        (trainer(wrapped(static_graph=True)), None),
        (trainer(wrapped(_comm_hooks=["a hook"])), None),
        (trainer(wrapped(nn.SyncBatchNorm(1))), SYNC),
        (trainer(wrapped(nn.SyncBatchNorm(1)), 1), None),
        (trainer(nn.Linear(1, 1)), OWN),
        (trainer(wrapped(mixed_precision="bf16")), OWN),
        (trainer(wrapped(buffer_hook="a hook")), OWN),
        (trainer(wrapped(static_graph=True, _comm_hooks=["a hook"])), OWN),
        (trainer(nn.Linear(1, 1), 1, FSDPStrategy), SHARDS),
    ],
)
def test_a_rank_runs_a_window_again_if_no_other_waits_for_it(made: Any, why: str | None) -> None:
    assert obstacle(made) == why


def test_checkpointing_by_the_strategy_is_seen() -> None:
    for policy in (None, {nn.Linear}):
        strategy = pl.strategies.FSDPStrategy(activation_checkpointing_policy=policy)
        assert checkpoints_itself(SimpleNamespace(strategy=strategy)) is (policy is not None)
