"""A limit that was found is remembered for the same training step, and for no other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from reference import FEATURES, Samples, fit
from torch.utils.data import DataLoader, default_collate
from wide import BUDGET, Wide

from lightning_ga import AutoAccumulate
from lightning_ga.probe.cache import cache_folder


def run(
    module: Wide | None = None, dataset: Any = None, *, loader: Any = None, trainer: Any = None, **arguments: Any
) -> AutoAccumulate:
    """One short fit within the budget; every step of the module is counted."""
    callback = AutoAccumulate(**{"effective_batch_size": 64, "memory_budget": BUDGET, "verify": False, **arguments})
    data = DataLoader(Samples(128) if dataset is None else dataset, batch_size=64, **(loader or {}))
    fit(data, callback, module=Wide() if module is None else module, **{"max_epochs": 1, **(trainer or {})})
    return callback


class Counting(Wide):
    """Notes the samples of each step, of probe and training, in a file, which a probe does not put back."""

    file: ClassVar[Path]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.file.open("a") as file:
            print(len(batch[0]), file=file)
        return super().training_step(batch, batch_idx)


def test_a_remembered_limit_takes_no_trial_and_one_step(tmp_path: Path) -> None:
    def sizes() -> list[int]:
        return [int(size) for size in Counting.file.read_text().split()]

    Counting.file = tmp_path / "steps"
    first = run(Counting())
    steps = len(sizes())
    second = run(Counting())
    assert second.probe.limit == first.probe.limit
    assert (second.probe.source, second.probe.trials, second.probe.steps) == ("cache", (), 1)
    assert second.probe.curve == first.probe.curve
    assert second.plan == first.plan
    # One step verifies; one backward pass of two samples shows which gradients there are.
    assert steps - (len(sizes()) - steps) == first.probe.steps - 1
    assert first.probe.limit in sizes()[steps : steps + 2]


class Other(Wide):
    """Computes something else, with the same layers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.net(batch[0]).square().mean()


def changed(change: Callable[[Wide], Any]) -> Wide:
    module = Wide()
    change(module)
    return module


def widen(module: Wide) -> None:
    module.net = torch.nn.Sequential(torch.nn.Linear(FEATURES, 49), torch.nn.Tanh(), torch.nn.Linear(49, 1)).double()


class Optimized(Wide):
    """By another optimizer, or with another option of it."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        super().__init__()
        self.make, self.options = make, options

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters(), **self.options)


OTHERS: dict[str, Callable[[], AutoAccumulate]] = {
    "another budget": lambda: run(memory_budget=BUDGET - 5000),
    "another layer": lambda: run(changed(widen)),
    "a frozen layer": lambda: run(changed(lambda module: module.net[0].requires_grad_(False))),
    "another setting": lambda: run(changed(lambda module: setattr(module, "keep_activations", True))),
    "another step": lambda: run(Other()),
    "another optimizer": lambda: run(Optimized(torch.optim.SGD, lr=1e-3)),
    "another option of the optimizer": lambda: run(Optimized(torch.optim.Adam, lr=1e-3, amsgrad=True)),
    "another precision": lambda: run(trainer={"precision": "64-true"}),
    "clipping": lambda: run(trainer={"gradient_clip_val": 1.0}),
    "another collate function": lambda: run(loader={"collate_fn": lambda batch: default_collate(batch)}),
    "other samples": lambda: run(dataset=[(*Samples(128)[i], torch.zeros(3)) for i in range(128)]),
    "another objective": lambda: run(objective="throughput"),
}


@pytest.fixture(scope="module")
def found_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after a run."""
    folder = tmp_path_factory.mktemp("found_once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        run()
    return folder


@pytest.fixture
def _remembered(found_once: Path) -> None:
    """The limit of ``run()`` is known, in a cache of the test's own."""
    shutil.copytree(found_once, os.environ["XDG_CACHE_HOME"], dirs_exist_ok=True)


@pytest.mark.usefixtures("_remembered")
@pytest.mark.parametrize("what", OTHERS)
def test_it_holds_for_the_same_step_only(what: str) -> None:
    assert OTHERS[what]().probe.source != "cache"
    assert run().probe.source == "cache"


@pytest.mark.usefixtures("_remembered")
def test_what_takes_no_memory_may_change() -> None:

    assert run(Optimized(torch.optim.Adam, lr=1.0)).probe.source != "cache"  # another class and other code
    same = Wide()
    with torch.no_grad():
        same.net[0].weight.fill_(0.5)
    assert run(same, dataset=Samples(96), effective_batch_size=96).probe.source == "cache"


def test_a_limit_that_was_bounded_is_looked_for_again_where_more_is_asked_for() -> None:
    run(max_micro_batch_size=4)
    found = run().probe
    assert found.source != "cache"
    assert found.limit > 4
    assert run(max_micro_batch_size=4).plan.micro_batch_size <= 4


def test_what_was_predicted_for_more_samples_is_not_told_of_fewer() -> None:
    """Without a budget a CPU runs no step at the limit: peak and holders are those of the batch that is trained."""
    run(memory_budget=None)
    found = run(memory_budget=None, max_micro_batch_size=4).probe
    alone = run(memory_budget=None, max_micro_batch_size=4, cache=False).probe
    assert (found.limit, found.peak_bytes, found.holders) == (4, alone.peak_bytes, alone.holders)


def test_cache_false_neither_reads_nor_writes() -> None:
    run(cache=False)
    assert not cache_folder().exists()
    run()
    assert run(cache=False).probe.source != "cache"


def test_a_limit_that_does_not_fit_any_more_is_looked_for_again() -> None:
    """The one step that verifies it runs out of memory."""
    limit = run().probe.limit
    (file,) = cache_folder().iterdir()
    content = json.loads(file.read_text())
    content["probe"]["limit"] = limit + 1
    file.write_text(json.dumps(content))
    found = run().probe
    assert found.limit == limit
    assert found.source != "cache"
