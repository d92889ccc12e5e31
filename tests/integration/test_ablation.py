"""Whatever a probe puts back is needed: with any one thing left out, the training differs from one without a probe."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from everything import Average, difference, run

from lightning_ga import AutoAccumulate
from lightning_ga.compat import patching, trial_steps
from lightning_ga.snapshot import state as snapshot
from lightning_ga.snapshot.contents import Contents, ObjectState
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.state import Attributes, SavedGradients, SwappedState, TensorValues

pytestmark = pytest.mark.slow  # together; that nothing is left out is what test_traceless.py holds
Omit = Callable[[pytest.MonkeyPatch], None]
BUDGET = "60KB"  # fp16 with a scaler


def settings() -> dict[str, Any]:
    from everything import fp16_on_the_cpu

    return {"plugins": fp16_on_the_cpu(), "max_epochs": 1}


@pytest.fixture(scope="module")
def limit(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the probe finds; the scenario is restored whole."""
    callback = AutoAccumulate(memory_budget=BUDGET, batch_norm="ignore", cache=False)
    run(tmp_path_factory.mktemp("limit"), callback, **settings())
    assert callback.probe is not None
    return callback.probe.limit


@pytest.fixture(scope="module")
def without(limit: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The training without a probe."""
    fixed = AutoAccumulate(micro_batch_size=limit, batch_norm="ignore", verify=False)
    return run(tmp_path_factory.mktemp("without"), fixed, **settings())


def with_a_probe(folder: Path, limit: int) -> dict[str, Any]:
    """The training after a probe; the limit is given, should it be found wrongly."""
    given = {"memory_budget": BUDGET, "max_micro_batch_size": limit, "batch_norm": "ignore", "verify": False}
    return run(folder, AutoAccumulate(**given, cache=False), **settings())


# --- what is left out --------------------------------------------------------------------------


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The control."""


def restore_of(kind: type) -> Omit:
    return lambda patch: patch.setattr(kind, "restore", lambda self: None)


def tensors(wanted: Callable[[torch.Tensor], bool]) -> Omit:
    """Values of some tensors."""
    original = TensorValues.__init__

    def omit(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(TensorValues, "__init__", lambda self, given: original(self, [t for t in given if not wanted(t)]))

    return omit


def requires_grad(patch: pytest.MonkeyPatch) -> None:
    original = TensorValues.restore

    def restore(self: TensorValues) -> None:
        self._kept = [(tensor, value, tensor.requires_grad) for tensor, value, _ in self._kept]
        original(self)

    patch.setattr(TensorValues, "restore", restore)


def entry(*names: str) -> Omit:
    """Entries of dictionaries that are refilled, of any object."""
    original = Contents.restore

    def restore(self: Contents) -> None:
        tables = [kept for kept, _ in self._kept if isinstance(kept, dict)]
        left = [(table, {name: table[name] for name in names if name in table}) for table in tables]
        original(self)
        for table, values in left:
            table.update(values)

    return lambda patch: patch.setattr(Contents, "restore", restore)


def containers(wanted: Callable[[Any], bool]) -> Omit:
    """Some of the containers that are refilled."""
    original = Contents.__init__

    def omit(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Contents, "__init__", lambda self, given: original(self, [t for t in given if not wanted(t)]))

    return omit


def attribute(name: str) -> Omit:
    """An attribute of Lightning's loops or connectors."""
    original = Attributes.take

    def take(self: Attributes, owner: Any, *names: str, copied: bool = False) -> None:
        original(self, owner, *(each for each in names if each != name), copied=copied)

    return lambda patch: patch.setattr(Attributes, "take", take)


def plain(*names: str) -> Omit:
    """Attributes of modules."""
    original = snapshot._plain

    def left(module: Any) -> dict[str, Any]:
        return {name: value for name, value in original(module).items() if name not in names}

    return lambda patch: patch.setattr(snapshot, "_plain", left)


def random_numbers(of: str) -> Omit:
    original = RandomState.restore

    def restore(self: RandomState) -> None:
        now = {"_torch": torch.get_rng_state(), "_numpy": np.random.get_state(), "_python": random.getstate()}
        setattr(self, of, now[of])
        original(self)

    return lambda patch: patch.setattr(RandomState, "restore", restore)


def behind_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshot, "_behind_hooks", lambda module: iter(()))


@contextmanager
def heard_by_the_average(trainer: Any) -> Iterator[None]:
    """A callback of the user's hears of trials."""
    call = patching.sibling(trainer, "trainer.call")
    inner = call._call_callback_hooks

    def tell(trainer: Any, hook: str, *arguments: Any, **_: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, Average):
                getattr(callback, hook)(trainer, trainer.lightning_module, *arguments)

    call._call_callback_hooks = tell
    try:
        yield
    finally:
        call._call_callback_hooks = inner


def muting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trial_steps, "muted", heard_by_the_average)


def cloning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshot, "_is_plain", lambda cls: False)


def holds_functions(table: Any) -> bool:
    """Hooks of a module."""
    return isinstance(table, dict) and len(table) > 0 and all(callable(value) for value in table.values())


OMITTED: dict[str, Omit] = {
    "parameters": tensors(lambda t: isinstance(t, torch.nn.Parameter)),
    "buffers": tensors(lambda t: not isinstance(t, torch.nn.Parameter)),
    "requires_grad": requires_grad,
    "gradients": restore_of(SavedGradients),
    "tables of buffers and hooks": containers(lambda t: isinstance(t, dict) and "scale" in t),
    "plain attributes": restore_of(SwappedState),
    "a counter": plain("calls"),
    "a list": plain("seen"),
    "a tensor attribute": plain("average"),
    "a generator": plain("generator"),
    "training flags": plain("training"),
    "metric states": plain("value", "tp", "fp", "fn", "tn"),
    "counts of a metric": plain("_update_count"),
    "cached results of a metric": plain("_computed"),
    "what hooks write to": behind_hooks,
    "hooks": containers(holds_functions),
    "objects that cannot be copied": cloning,
    "optimizer state": containers(lambda t: isinstance(t, defaultdict)),
    "param groups": entry("weight_decay"),
    "optimizer's attributes": entry("mine"),
    "schedulers": entry("last_epoch"),
    "scaler": attribute("scaler"),
    "random numbers of torch": random_numbers("_torch"),
    "random numbers of NumPy": random_numbers("_numpy"),
    "random numbers of Python": random_numbers("_python"),
    "callbacks muted": muting,
    "objects": restore_of(ObjectState),
    "trainer: loggers": entry("_loggers"),
    "trainer: profiler": entry("profiler"),
    "trainer: stop": entry("should_stop"),
    "datamodule": entry("asked"),
    "results": attribute("_results"),
    "batch progress": attribute("batch_progress"),
    "optimizer progress": attribute("optim_progress"),
    "progress bar metrics": attribute("_progress_bar_metrics"),
    "logged metrics": attribute("_logged_metrics"),
    "callback metrics": attribute("_callback_metrics"),
    "first batch": attribute("_first_loop_iter"),
}


def test_with_nothing_left_out_there_is_no_difference(without: Any, limit: int, tmp_path: Path) -> None:
    """Or the tests below would show nothing."""
    assert difference(with_a_probe(tmp_path, limit), without) is None


@pytest.mark.parametrize("name", OMITTED)
def test_each_thing_is_needed(name: str, without: Any, limit: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Training differs, or cannot even go on."""
    OMITTED[name](monkeypatch)
    try:
        found = difference(with_a_probe(tmp_path, limit), without)
    except Exception as error:
        found = repr(error)
    assert found is not None
    print(f"{name}: {found}")
