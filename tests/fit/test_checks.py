"""What cannot work is refused by name, with the way out; what works passes."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler

from lightning_ga import AutoAccumulate
from lightning_ga.errors import UserError
from lightning_ga.fit.checks import check_schedule, check_trainer
from lightning_ga.plan.config import Request, read_request


class Plain(pl.LightningModule):
    """A module as most are."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing."""


def trainer(**settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **settings
    )


def asked(effective: Any = None, accumulate: Any = None, micro_batch: Any = "auto") -> Request:
    return read_request(effective, accumulate, micro_batch, None)


def test_a_finder_that_the_user_did_not_write_is_explained() -> None:
    """``Tuner.scale_batch_size`` puts it among the callbacks."""
    for own, told in (
        (BatchSizeFinder(), r" \(Tuner.scale_batch_size adds one\)"),
        (GradientAccumulationScheduler({0: 1}), ""),
    ):
        with pytest.raises(UserError, match=rf"remove {type(own).__name__}{told}\.$"):
            check_trainer(trainer(callbacks=[AutoAccumulate(), own]), Plain(), asked())


def test_one_callback_plans() -> None:
    """A second of a class derived from it would cut what the first has cut."""

    class Mine(AutoAccumulate):
        pass

    made = trainer(callbacks=[AutoAccumulate(), Mine()])
    with pytest.raises(UserError, match=r"AutoAccumulate more than once \(AutoAccumulate, Mine\): leave one of them"):
        check_trainer(made, Plain(), asked())


def test_a_factor_is_set_in_one_place_only() -> None:
    """By the callback or by the Trainer; an effective batch goes with a factor of the recipe's."""
    check_trainer(trainer(accumulate_grad_batches=4), Plain(), asked())
    check_trainer(trainer(accumulate_grad_batches=4), Plain(), asked(effective=32))
    check_trainer(trainer(), Plain(), asked(accumulate=4))
    with pytest.raises(UserError, match=r"accumulate=3 and Trainer\(accumulate_grad_batches=2\) both set the factor"):
        check_trainer(trainer(accumulate_grad_batches=2), Plain(), asked(accumulate=3))
    with pytest.raises(UserError, match=r"accumulate=1 and Trainer\(accumulate_grad_batches=2\)"):
        check_trainer(trainer(accumulate_grad_batches=2), Plain(), asked(accumulate={4: 3}))


class Accumulating:
    """A strategy such as DeepSpeed's."""

    handles_gradient_accumulation = True


class FSDPStrategy:
    """A strategy of this name shards the model."""

    handles_gradient_accumulation = False


def with_strategy(strategy: object) -> Any:
    made = trainer()
    made._accelerator_connector.strategy = strategy  # type: ignore[assignment]
    return made


def test_strategies_that_accumulate_on_their_own_are_refused() -> None:
    check_trainer(with_strategy(FSDPStrategy()), Plain(), asked(micro_batch=4))
    check_trainer(with_strategy(FSDPStrategy()), Plain(), asked())
    with pytest.raises(UserError, match="Accumulating accumulates gradients on its own.*ddp"):
        check_trainer(with_strategy(Accumulating()), Plain(), asked())


def test_a_schedule_is_checked_for_all_epochs_before_the_first() -> None:
    """An effective batch below the number of ranks in epoch 7 does not wait until then."""
    schedule = asked(effective={0: 8, 7: 2})
    check_schedule(schedule, range(7), world_size=4)
    check_schedule(schedule, range(20), world_size=2)
    check_schedule(asked(), range(20), world_size=64)
    with pytest.raises(UserError, match="effective_batch_size=2 is below the number of ranks, 4"):
        check_schedule(schedule, range(8), world_size=4)
    assert check_schedule(asked(effective={0: 8, 7: 10**9}), range(8), world_size=1, micro_batch=100) == 10**9
    with pytest.raises(UserError, match="would take 62,500,000 micro-batches of 16 for one optimizer step"):
        check_schedule(asked(effective={0: 8, 7: 10**9}), range(8), world_size=1, micro_batch=16)
