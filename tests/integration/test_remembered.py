"""A limit that was found is remembered for the same training step, and for no other."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import Samples, SaveAt, fit, loss
from torch.utils.data import DataLoader, default_collate
from wide import BUDGET, Wide

from lightning_ga import AutoAccumulate
from lightning_ga.probe.cache import cache_folder
from lightning_ga.probe.throughput import SLOWER


def run(
    module: Wide | None = None, dataset: Any = None, *, loader: Any = None, trainer: Any = None, **arguments: Any
) -> AutoAccumulate:
    """One short fit within the budget."""
    callback = AutoAccumulate(**{"effective_batch_size": 64, "memory_budget": BUDGET, "verify": False, **arguments})
    data = DataLoader(Samples(128) if dataset is None else dataset, batch_size=64, **(loader or {}))
    fit(data, callback, module=Wide() if module is None else module, **{"max_epochs": 1, **(trainer or {})})
    return callback


def test_a_remembered_limit_takes_no_trial_and_one_step() -> None:
    first, second = run(), run()
    assert (second.probe.source, second.probe.trials, second.probe.steps) == ("cache", (), 1)
    assert (second.probe.limit, second.probe.curve, second.plan) == (first.probe.limit, first.probe.curve, first.plan)


class Other(Wide):
    """Computes something else, with the same layers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.net(batch[0]).square().mean()


def with_other_indices(batch: Any) -> Any:
    """The same batch, but for the type of a field."""
    *fields, indices = default_collate(batch)
    return [*fields, indices.half()]


def changed(change: Callable[[Wide], Any]) -> Wide:
    module = Wide()
    change(module)
    return module


class ByMomentum(Wide):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


OTHERS: dict[str, Callable[[], AutoAccumulate]] = {
    "another budget": lambda: run(memory_budget=BUDGET - 5000),
    "a frozen layer": lambda: run(changed(lambda module: module.net[0].requires_grad_(False))),
    "another step": lambda: run(Other()),
    "another optimizer": lambda: run(ByMomentum()),
    "another precision": lambda: run(trainer={"precision": "64-true"}),
    "clipping": lambda: run(trainer={"gradient_clip_val": 1.0}),
    "another collate function": lambda: run(loader={"collate_fn": with_other_indices}),
    "other samples": lambda: run(dataset=[(*Samples(128)[i], torch.zeros(3)) for i in range(128)]),
    "another objective": lambda: run(objective="throughput"),
}


def test_it_holds_for_the_same_step_only() -> None:
    """What takes no memory may change."""
    run()
    assert {what: make().probe.source for what, make in OTHERS.items()} == dict.fromkeys(OTHERS, "probe")
    same = changed(lambda module: torch.nn.init.constant_(module.net[0].weight, 0.5))
    same.label = "another run"
    assert run(same, dataset=Samples(96), effective_batch_size=96).probe.source == "cache"


def test_cache_false_neither_reads_nor_writes() -> None:
    run()
    files = [*cache_folder().iterdir()]
    assert run(cache=False).probe.source == "probe"
    run(Other(), cache=False)
    assert [*cache_folder().iterdir()] == files


def test_a_limit_that_was_bounded_is_looked_for_again_where_more_is_asked_for() -> None:
    run(max_micro_batch_size=4)
    found = run().probe
    assert found.source != "cache"
    assert found.limit > 4
    assert run(max_micro_batch_size=4).plan.micro_batch_size <= 4


def test_a_limit_that_does_not_fit_any_more_is_looked_for_again() -> None:
    """The one step that verifies it runs out of memory."""
    run()
    (file,) = cache_folder().iterdir()
    content = json.loads(file.read_text())
    limit = content["probe"]["limit"]
    content["probe"]["limit"] += 1
    file.write_text(json.dumps(content))
    found = run().probe
    assert found.limit == limit
    assert found.source != "cache"


class Viewed(Wide):
    """Repeats its batch as often as an attribute says, which no key contains."""

    def __init__(self, views: int) -> None:
        super().__init__()
        self.views = views

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = (torch.cat([field] * self.views) for field in batch[:2])
        return loss(self.net, inputs, targets)


@pytest.mark.parametrize(("before", "now"), [(20, 1), (1, 20)])
def test_a_step_that_takes_other_memory_than_is_remembered_is_probed_again(before: int, now: int) -> None:
    """More or less, in the one step that verifies the limit."""
    run(Viewed(before), max_micro_batch_size=32)
    right = run(Viewed(now), cache=False).probe
    found = run(Viewed(now)).probe
    assert (found.source, found.limit, found.peak_bytes) == ("probe", right.limit, right.peak_bytes)


def test_a_limit_that_no_step_may_reach_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without a budget running out ends the process, and a step of few samples may not show a change."""
    monkeypatch.setattr("lightning_ga.probe.meters.available_memory", lambda _: BUDGET)
    first = run(Viewed(1), memory_budget=None).probe
    right = run(Viewed(2), memory_budget=None, cache=False).probe
    found = run(Viewed(2), memory_budget=None).probe
    assert (found.source, found.limit) == ("probe", right.limit)
    assert right.limit < first.limit


@pytest.mark.filterwarnings("ignore:Memory ran out in")
def test_an_error_deletes_what_is_remembered() -> None:
    """Another process may have caused it: the next run looks for the limit again, and finds the same."""

    class Failing(Wide):
        fails = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.fails and self.global_step == 1:
                type(self).fails = False
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    known = run(Failing()).probe
    Failing.fails = True
    run(Failing())
    assert not list(cache_folder().iterdir())
    found = run(Failing()).probe
    assert (found.source, found.limit) == ("probe", known.limit)


@pytest.mark.parametrize("error", [RuntimeError("vanished"), torch.OutOfMemoryError("out of memory")])
def test_a_limit_is_looked_for_again_if_a_gradient_of_zeros_is_refused(error: Exception) -> None:
    """Without a state of the optimizer, no single step verifies it; the first step of a search makes it."""

    class Refusing(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            value = closure()
            if not any(parameter.grad.any() for parameter in self.param_groups[0]["params"]):
                raise error
            super().step()
            return value

    class Refused(Wide):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return Refusing(self.parameters(), lr=1e-3)

    first, second = (run(Refused()).probe for _ in range(2))
    assert (second.source, second.limit) == ("probe", first.limit)


def test_the_smallest_of_the_fast_sizes_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its timings, under ``objective="throughput"``."""
    now = [0.0]
    monkeypatch.setattr("lightning_ga.probe.trainer_limit.time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Wide):
        """A pass takes 8 ms for up to eight samples, and in proportion beyond: nothing is gained by more."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            now[0] += 0.001 * max(8, len(batch[0]))
            return super().training_step(batch, batch_idx)

    first, again = (run(Slow(), objective="throughput") for _ in range(2))
    found = first.probe
    assert found.limit > 16
    assert found.fastest == first.plan.micro_batch_size == 8
    best = min(timing.seconds for timing in found.timings)
    assert found.fastest == min(each.micro_batch_size for each in found.timings if each.seconds <= SLOWER * best)
    assert max(timing.micro_batch_size for timing in found.timings) <= found.limit
    assert (again.probe.source, again.probe.timings, again.plan) == ("cache", found.timings, first.plan)


@pytest.mark.parametrize("resumed", ["memory", "throughput"])
@pytest.mark.parametrize("saved", ["memory", "throughput"])
def test_a_checkpoint_is_asked_for_what_its_objective_has_found(saved: str, resumed: str, tmp_path: Path) -> None:
    """A limit has no timings, and the fastest size is no limit."""
    path = tmp_path / "saved.ckpt"
    data = DataLoader(Samples(128), batch_size=64)
    arguments: Any = {"effective_batch_size": 64, "memory_budget": BUDGET, "verify": False, "cache": False}
    fit(data, AutoAccumulate(objective=saved, **arguments), SaveAt(path, 1), module=Wide(), max_epochs=1)  # type: ignore[arg-type]
    callback = AutoAccumulate(objective=resumed, **arguments)  # type: ignore[arg-type]
    fit(data, callback, module=Wide(), max_epochs=1, ckpt_path=path)
    assert callback.probe is not None
    assert callback.probe.source == ("probe" if (saved, resumed) == ("memory", "throughput") else "checkpoint")
    assert (callback.probe.fastest is None) == (resumed == "memory")


def test_what_was_timed_does_not_outlive_a_smaller_limit() -> None:
    """Windows are timed again, up to that limit."""
    first = run(objective="throughput").probe
    assert first is not None
    assert first.fastest is not None
    found = run(objective="throughput", max_micro_batch_size=3).probe
    assert found is not None
    assert (found.limit, found.source) == (3, "cache")
    assert found.fastest in [timing.micro_batch_size for timing in found.timings] != []
