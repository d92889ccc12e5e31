"""The probe on modules, data and optimizers of every kind: it finds the limit and disturbs nothing."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Samples, fit, fp16_on_the_cpu
from torch.utils.data import DataLoader
from wide import BUDGET, Wide

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.batch.layout import LayoutError
from lightning_ga.fit import limit_search
from lightning_ga.memory.allocator_segments import ROUNDING
from lightning_ga.memory.device import total_memory
from lightning_ga.memory.trace import rounded_up
from lightning_ga.probe.budget import Budget
from lightning_ga.probe.meters import StepMeter
from lightning_ga.probe.probed_loop import ProbedLoop
from lightning_ga.probe.prober import Prober
from lightning_ga.testing import limit_memory


def probe(module: pl.LightningModule, dataset: Any = None, *, callbacks: Any = (), **settings: Any) -> AutoAccumulate:
    """The callback after a fit of one epoch within the budget."""
    callback = AutoAccumulate(64, memory_budget=settings.pop("budget", BUDGET))
    loader = DataLoader(Samples(128) if dataset is None else dataset, batch_size=64, **settings.pop("loader", {}))
    fit(loader, *callbacks, callback, module=module, max_epochs=1, **settings)
    return callback


class Cuts:
    """Batches of which a cut ends in an error, or does not."""

    empty, most = False, 4

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def make(self, count: int, move: Any) -> None:
        if self.error is not None:
            raise self.error


def test_trials_of_the_longest_samples_do_not_bound_shorter_ones() -> None:
    """If no step near the budget may run: two of the longest are too many, and twenty of the shorter fit."""
    length = 100
    layer = torch.nn.Linear(1000, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def step(samples: int) -> None:
        layer(torch.randn(samples, length, 1000)).tanh().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    cpu = torch.device("cpu")
    training = ProbedLoop(step, None, None, bool)
    prober = Prober(training, StepMeter(cpu, training), Budget(600_000, total_memory(cpu)))
    assert prober.find(64, predict_only=True).limit == 1
    length = 5
    assert prober.confirm([20, 15, 10], predict_only=True)[0] == 20


FINE, UNCUT, FAILED = None, LayoutError("uncut"), RuntimeError("failed")


@pytest.mark.parametrize(
    ("own", "other", "raised"),
    [
        (FINE, FINE, None),
        (UNCUT, FINE, (LayoutError, "uncut")),
        (FINE, UNCUT, (LayoutError, "another rank")),
        (FAILED, FINE, (RuntimeError, "failed")),
        (FINE, FAILED, (RuntimeError, "on another rank")),
        (UNCUT, FAILED, (RuntimeError, "on another rank")),
        (FAILED, UNCUT, (RuntimeError, "failed")),
    ],
)
def test_ranks_vote_whatever_a_cut_ends_in(own: Any, other: Any, raised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them waits for one that is gone, and they go on together or not at all."""
    votes = iter([int(other is None), int(not isinstance(other, RuntimeError))])
    monkeypatch.setattr(limit_search.ranks, "smallest_over_ranks", lambda _, value: min(value, next(votes)))
    if raised is None:
        limit_search._require_cut_on_all_ranks(None, Cuts(own))  # type: ignore[arg-type]
        return
    with pytest.raises(raised[0], match=raised[1]):
        limit_search._require_cut_on_all_ranks(None, Cuts(own))  # type: ignore[arg-type]


@pytest.mark.loader_only(
    reason="its micro-batches are larger than the loader's batches, which a step only makes smaller"
)
def test_training_at_the_limit_fits_and_one_more_does_not() -> None:
    """In the real fit, on an emulated device, to the sample."""
    limit = probe(Wide()).probe.limit
    assert 1 < limit < 64
    dataset = Samples(4 * limit + 4)  # it lies on the host

    def train(micro_batch: int) -> None:
        callback = AutoAccumulate(4 * micro_batch, micro_batch_size=micro_batch, verify=False, on_oom="raise")
        with limit_memory(BUDGET):
            fit(DataLoader(dataset, batch_size=8), callback, module=Wide(), max_epochs=2)

    train(limit)
    with pytest.raises(torch.OutOfMemoryError):
        train(limit + 1)


@pytest.mark.loader_only(
    reason="its micro-batches are larger than the loader's batches, which a step only makes smaller"
)
@pytest.mark.parametrize("unreached", [False, True])
def test_parameters_that_no_loss_reaches_have_neither_gradients_nor_state_in_trials(unreached: bool) -> None:
    """The limit is the same as without them but for their own bytes, and as many steps are tried at most."""

    class Beside(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.beside = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64), requires_grad=unreached)

    found = probe(Beside(), budget=BUDGET + 8000).probe
    plain = probe(Wide()).probe
    beside = rounded_up(8000, ROUNDING) if torch.cuda.is_available() else 8000
    assert (found.limit, found.peak_bytes) == (plain.limit, plain.peak_bytes + beside)
    if torch.cuda.is_available():  # there the optimizer makes its state in a step
        assert (plain.steps, found.steps) == (4, 4)
    else:
        assert (plain.steps, found.steps) == (3, 4 if unreached else 3)


@pytest.mark.loader_only(reason="a window of several batches of the loader is in question")
def test_after_a_failed_probe_micro_batches_are_those_of_the_recipe() -> None:
    """Not a rank's whole share of the window."""

    class OnlyFour(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if len(batch[0]) != 4:
                raise ValueError("four")
            return super().training_step(batch, batch_idx)

    callback = AutoAccumulate(verify=False)
    with pytest.warns(UserWarning, match="ended in ValueError: four. Training uses micro-batches of the recipe, 4"):
        fit(DataLoader(Samples(24), batch_size=4), callback, module=OnlyFour(), accumulate_grad_batches=3)
    assert (callback.plan.micro_batch_size, callback.plan.factor) == (4, 3)


def test_the_limit_holds_where_a_scaler_overflows_at_first() -> None:
    """A trial whose step is skipped would not see the optimizer's state."""

    class Loud(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return 100 * super().training_step(batch, batch_idx)

    module = Loud().float()
    data = [tuple(t.float() if torch.is_tensor(t) else t for t in Samples(128)[i]) for i in range(128)]
    limit = probe(module, data, budget=18_000, plugins=fp16_on_the_cpu(2.0**16, 2000)).probe.limit
    assert limit < 64
    callback, plugin = AutoAccumulate(64, micro_batch_size=limit, verify=False), fp16_on_the_cpu(2.0**16, 2000)
    with limit_memory(18_000):
        fit(DataLoader(data, batch_size=64), callback, module=Loud().float(), max_epochs=8, plugins=plugin)


def test_growing_optimizers_are_refused_with_the_way_out() -> None:
    """Rather than a wrong limit."""

    class Growing(Wide):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UserError, match="LBFGS keeps a history"):
        probe(Growing())
