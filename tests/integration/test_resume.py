"""A resume lands on the same sample, whatever wrote the checkpoint and whatever the micro-batch now is."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from reference import Regression, Samples, Validated, fit, worst_error
from torch.utils.data import DataLoader

from lightning_ga import AutoAccumulate

HOOKS = ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"]


class Saver(pl.Callback):
    """Saves a checkpoint on each call of one hook, and notes the steps that loggers would be given."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder, self.hook = folder, hook
        self.saved: list[tuple[Path, int]] = []
        self.logger_steps: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.logger_steps.append((trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped))

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        vars(self)[self.hook] = self.save

    def save(self, trainer: Any, *_: Any) -> None:
        path = self.folder / f"{len(self.saved)}.ckpt"
        trainer.save_checkpoint(path)
        self.saved.append((path, trainer.global_step))


def run(module: Regression, micro_batch: int, *callbacks: pl.Callback, verify: bool = True, **settings: Any) -> Any:
    loader = DataLoader(Samples(27), batch_size=5, shuffle=True)
    callback = AutoAccumulate(micro_batch_size=micro_batch, verify=verify)
    return fit(loader, callback, *callbacks, module=module, accumulate_grad_batches=2, max_epochs=3, **settings)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"val_check_interval": 2},
    {"max_steps": 8},
    {"val_check_interval": 4, "check_val_every_n_epoch": None},
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_training_goes_on_as_if_it_had_not_stopped(hook: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Windows, gradients, steps of optimizer and loggers, and validation are those of the whole run."""
    saver = Saver(tmp_path, hook)
    whole, whole_trainer = run(Validated(), 4, saver, **settings)
    assert saver.saved
    saved = list(enumerate(saver.saved, SETTINGS.index(settings)))
    for number, (path, step) in saved[:: 5 if settings else 1]:  # a window and the sizes below come every 2 and 3
        watcher, module = Saver(tmp_path, "on_exception"), Validated()
        micro_batch = (4, 3, 10)[number % 3]
        _, trainer = run(module, micro_batch, watcher, ckpt_path=path, seed=1, verify=False, **settings)
        assert [sorted(w) for w in module.windows[step:]] == [sorted(w) for w in whole.windows[step:]]
        left = whole.gradients[step:]
        assert len(module.gradients) == len(left)
        assert left == [] or worst_error(module.gradients, left) <= 1e-12
        assert trainer.global_step == whole_trainer.global_step
        assert set(watcher.logger_steps) <= set(saver.logger_steps)
        late = [at for at in whole.steps_at_validation if at > step]
        assert [at for at in module.steps_at_validation if at > step] == late
        for ours, theirs in zip(module.parameters(), whole.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_state_in_a_checkpoint_is_plain_values(tmp_path: Path) -> None:
    """It loads with ``weights_only=True``, and holds seed and position."""
    saver = Saver(tmp_path, "on_train_batch_end")
    run(Regression(), 5, saver)
    path, _ = saver.saved[3]
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["AutoAccumulate"]
    before = {"batches_before": 0, "steps_before": 0, "samples_before": 0, "samples_short": 0}
    assert state["position"] == {"seed": 7, "epoch": 0, "samples_done": 20, "shuffles": False, **before}
    assert state["probe"] is None
