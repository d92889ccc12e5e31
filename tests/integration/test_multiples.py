"""``micro_batch_multiple=``: micro-batches are multiples of a number, in training, probe and measurement."""

from typing import Any

import pytest
import torch
from reference import Regression, Samples, fit, plain_loop, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate, UserError
from lightning_ga.probe.training import ProbedTraining

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out in:UserWarning")


class Even(Regression):
    """Refuses an odd number of samples, as timm's ``Mixup`` does; memory runs out above ``most`` samples."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.most = most
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert len(batch[0]) % 2 == 0, "Batch size should be even when using this"
        self.sizes.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["loader", "step"])
@pytest.mark.parametrize(("given", "most", "sizes"), [(None, 7, [6, 4, 4]), (6, 99, [6, 4, 4]), (None, 5, [2] * 7)])
def test_micro_batches_are_even(given: int | None, most: int, sizes: list[int], mode: str) -> None:
    """With a size that is given, and after an error; the gradient is that of the whole window."""
    module = Even(most)
    ours = AutoAccumulate(micro_batch_size=given or 14, micro_batch_multiple=2, micro_batching=mode, verify=False)
    fit(DataLoader(Samples(28), batch_size=14), ours, module=module, max_epochs=1)
    assert module.sizes[-len(sizes) :] == sizes
    windows = [range(14), range(14, 28)]
    assert worst_error(module.gradients, plain_loop(Samples(28), windows)) < 1e-12


@pytest.mark.parametrize("mode", ["loader", "step"])
def test_probe_and_measurement_take_multiples(mode: str) -> None:
    ours = AutoAccumulate(memory_budget="16KiB", micro_batch_multiple=2, micro_batching=mode)
    fit(DataLoader(Samples(400), batch_size=200), ours, module=Even(), max_epochs=1)
    assert ours.probe is not None
    assert ours.plan is not None
    assert ours.plan.factor > 1
    assert ours.exactness is not None
    assert ours.exactness.cause == "exact"


class Divisible(Regression):
    """Refuses batches that are no multiples, and has wide activations, so that memory grows with the samples."""

    def __init__(self, multiple: int) -> None:
        super().__init__()
        self.multiples = range(0, 1000, multiple)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert len(batch[0]) in self.multiples
        wide = batch[0][:, :1].expand(-1, 100).sin().cos()
        return super().training_step(batch, batch_idx) + 0.0 * wide.sum()


def limit_of(multiple: int, budget: str, **arguments: Any) -> int:
    ours = AutoAccumulate(memory_budget=budget, micro_batch_multiple=multiple, cache=False, **arguments)
    fit(DataLoader(Samples(480), batch_size=240), ours, module=Divisible(multiple), max_epochs=1)
    assert ours.probe is not None
    assert all(trial.micro_batch_size % multiple == 0 for trial in ours.probe.trials)
    return ours.probe.limit


@pytest.mark.parametrize("multiple", [2, 3, 4, 8])
@pytest.mark.parametrize("budget", ["20KB", "30KB", "80KB", "200KB"])
def test_the_limit_is_the_largest_multiple_that_fits(budget: str, multiple: int) -> None:
    plain = limit_of(1, budget)
    assert plain > 8
    assert limit_of(multiple, budget) == plain - plain % multiple


def test_the_first_step_has_more_than_two_samples_only_if_running_out_is_survived() -> None:
    training = ProbedTraining()
    training.multiple = 8
    assert [*training.first_sizes(100)] == [8, 2, 1]
    assert [*training.first_sizes(100, cautious=True)] == [2, 1]
    assert [*training.first_sizes(1)] == [1]


def test_windows_of_multiples_are_timed() -> None:
    ours = AutoAccumulate(memory_budget="200KB", micro_batch_multiple=4, objective="throughput", cache=False)
    fit(DataLoader(Samples(480), batch_size=240), ours, module=Divisible(4), max_epochs=1)
    assert ours.probe is not None
    assert len(ours.probe.timings) > 1
    assert all(timing.micro_batch_size % 4 == 0 for timing in ours.probe.timings)


def test_a_remembered_limit_is_verified_with_a_multiple() -> None:
    sources = []
    for multiple in (1, 4, 4):
        ours = AutoAccumulate(memory_budget="80KB", micro_batch_multiple=multiple)
        fit(DataLoader(Samples(480), batch_size=240), ours, module=Divisible(multiple), max_epochs=1)
        assert ours.probe is not None
        assert ours.probe.limit % multiple == 0
        sources.append(ours.probe.source)
    assert sources == ["probe", "cache", "cache"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"micro_batch_multiple": 0}, "micro_batch_multiple=0 must be at least 1"),
        ({"micro_batch_multiple": 2, "micro_batch_size": 5}, "no multiple of micro_batch_multiple=2: give 6"),
        ({"micro_batch_multiple": 8, "max_micro_batch_size": 6}, "max_micro_batch_size=6 is below"),
        ({"micro_batch_multiple": 2, "whole": "net"}, "do not go together"),
        ({"micro_batch_multiple": 2, "size_of": "auto"}, "do not go together"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        AutoAccumulate(**arguments)
