"""Measure the critical batch: branch from a checkpoint at several batches, for the same samples.

``python -m lightning_ga.batch_size ckpt_path=RUN`` does so for a run of the command line; ``--help`` lists the keys.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl

from lightning_ga.callback import AutoAccumulate
from lightning_ga.errors import UserError, printable
from lightning_ga.plan.accumulation import ceil_div, require_count
from lightning_ga.plan.config import ScaleLr, rate_ratio, require_choice
from lightning_ga.plan.critical_batch import BatchPoint, CriticalBatch, batches_around

_UNMEASURED = partial(AutoAccumulate, verify=False)
_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def measure_batch_size(
    make: Callable[[], tuple[Any, Any]],
    ckpt_path: str | Path,
    *,
    batch: int,
    samples: int,
    folder: str | Path,
    seeds: int = 3,
    scale_lr: ScaleLr = "sqrt",
    lr: float | None = None,
    tolerance: float = 0.01,
    monitor: str = "val/loss",
    make_callback: Callable[[int], AutoAccumulate] = _UNMEASURED,
    tell: Callable[[str], None] = print,
    **trainer: Any,
) -> CriticalBatch:
    """Measure the largest batch that trains as well on the same samples as smaller ones do.

    From a checkpoint, training branches at B/2, B, 2B and 4B. Each branch begins with the checkpoint's weights and
    optimizer state, keeps its learning rate (scaled by the rule, without schedulers), and is validated after the same
    number of samples.

    Args:
        make: Returns a fresh module and its datamodule, which has a validation set.
        ckpt_path: A checkpoint of a fit with one optimizer.
        batch: Effective batch B that the checkpoint's learning rate belongs to.
        samples: Samples of each branch, over all ranks: rounded to whole epochs, or to steps of 4B within one.
        folder: For ``batch_size.json``, from which a second call continues if checkpoint and arguments are the same.
        seeds: Branches of each batch, which differ in the order of samples; at least two.
        scale_lr: How the learning rate follows the batch, as in ``AutoAccumulate``.
        lr: Learning rate at B of all parameter groups, instead of the checkpoint's.
        tolerance: Share of the lowest loss by which that of a larger batch may be higher.
        monitor: The metric of validation; lower is better.
        make_callback: Returns the callback of a branch for its effective batch. A loss that needs ``normalize=`` or
            ``whole=`` needs them here too.
        tell: Called with each line of progress.
        trainer: Arguments of each branch's Trainer, such as ``accelerator="cpu"``.

    Raises:
        UserError: If an argument is wrong, or the checkpoint or the metric shows nothing.
    """
    batch = require_count("batch", batch)
    if require_count("seeds", seeds) < 2:
        raise UserError(f"{seeds=} gives no standard error: use at least 2.")
    require_choice("scale_lr", scale_lr, get_args(ScaleLr))
    if "callbacks" in trainer:
        raise UserError(
            "callbacks= would be shared by all branches: return new ones from configure_callbacks of the module."
        )
    for name, value in {"tolerance": tolerance, "lr": lr}.items():
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise UserError(f"{name}={value!r} must be a number above 0.")
    _, data = make()
    samples, of_epoch = _rounded(require_count("samples", samples), 4 * batch, data)
    from lightning_ga.checkpoints import read_safely  # the library does without Hydra

    content = read_safely(Path(ckpt_path))
    if len(content.get("optimizer_states") or ()) != 1:
        raise UserError(f"ckpt_path={ckpt_path} has no state of one optimizer: give one of a fit, such as last.ckpt.")
    run = _Branches(make, content, scale_lr, batch, lr, monitor, make_callback, trainer)
    arguments = {"batch": batch, "samples": samples, "lr": lr, "monitor": monitor, "scale_lr": scale_lr}
    setting = _setting(Path(ckpt_path), {**arguments, "callback": make_callback, "trainer": trainer})
    losses = _known(Path(folder), setting)
    sizes = batches_around(batch, samples)
    if len(sizes) < 2:
        raise UserError(f"{samples=} are too few to compare {batch=} with another: give more, or a smaller batch.")
    left = [(size, seed) for seed, size in product(range(seeds), sizes) if f"{size}/{seed}" not in losses]
    for number, (size, seed) in enumerate(left, 1):
        end = {"max_steps": samples // size}
        if samples >= of_epoch:
            end = {"max_epochs": samples // of_epoch}
        loss = run.loss(size, seed, end)
        losses[f"{size}/{seed}"] = loss
        part = Path(folder) / "batch_size.part"
        part.write_text(json.dumps({"setting": setting, "losses": losses}, indent=1) + "\n")
        part.replace(Path(folder) / "batch_size.json")
        tell(f"{number} of {len(left)}: batch {size}, seed {seed}, {samples:,} samples: {monitor} {loss:.4f}")
    of_sizes = [tuple(losses[f"{size}/{seed}"] for seed in range(seeds)) for size in sizes]
    return CriticalBatch(tuple(map(BatchPoint, sizes, of_sizes)), tolerance, samples)


@dataclass(frozen=True, slots=True)
class _Branches:
    """Trainings that begin with a checkpoint."""

    make: Callable[[], tuple[Any, Any]]
    content: Mapping[str, Any]  # of the checkpoint
    scale_lr: ScaleLr
    batch: int  # that its learning rate belongs to
    lr: float | None  # instead of the checkpoint's
    monitor: str
    make_callback: Callable[[int], AutoAccumulate]
    trainer: Mapping[str, Any]  # arguments of it

    def loss(self, size: int, seed: int, end: Mapping[str, int]) -> float:
        """Train with a batch of so many samples until the ``end``, and validate."""
        module, data = self.make()
        pl.seed_everything(seed, workers=True, verbose=False)  # now, as what the user makes may be seeded
        settings: dict[str, Any] = {**_QUIET, "max_epochs": -1, **self.trainer, **end, "limit_val_batches": 0}
        start = pl.callbacks.LambdaCallback(on_fit_start=partial(self._begin, size))  # before the probe
        pl.Trainer(**settings, callbacks=[self.make_callback(size), start]).fit(module, datamodule=data)
        judge = pl.Trainer(**{**_QUIET, **self.trainer})
        judge.validate(module, datamodule=data, verbose=False)
        if self.monitor not in judge.callback_metrics:
            known = ", ".join(sorted(judge.callback_metrics))
            raise UserError(f"monitor={self.monitor!r} is no metric of validation: {known}.")
        return float(judge.callback_metrics[self.monitor])

    def _begin(self, size: int, trainer: Any, module: Any) -> None:
        """Take the checkpoint's weights over, and its optimizer's state at a fixed learning rate."""
        module.load_state_dict(self.content["state_dict"])
        trainer.strategy.lr_scheduler_configs = []
        (optimizer,) = trainer.optimizers
        (state,) = self.content["optimizer_states"]
        optimizer.load_state_dict(deepcopy(state))  # it would train on in these tensors
        for group in optimizer.param_groups:
            rate = group["lr"] if self.lr is None else self.lr
            if rate < 0.01 * group.get("initial_lr", 0.0) or not rate:
                raise UserError(f"The checkpoint's learning rate has fallen to {rate:.3g}, too low to show: give lr=….")
            group["lr"] = rate * rate_ratio(self.scale_lr, size, self.batch)


def _rounded(samples: int, multiple: int, data: Any) -> tuple[int, int]:
    """Return samples in whole epochs, or within one epoch in whole multiples, and the samples of an epoch."""
    data.prepare_data()
    data.setup("fit")
    of_epoch = len(data.train_dataloader().dataset)
    if samples >= of_epoch:
        return round(samples / of_epoch) * of_epoch, of_epoch
    if multiple > of_epoch:
        raise UserError(
            f"samples={samples} of {of_epoch} contain no window of {multiple} samples: give a smaller batch."
        )
    return min(ceil_div(samples, multiple), of_epoch // multiple) * multiple, of_epoch


def _setting(ckpt_path: Path, arguments: Mapping[str, Any]) -> Any:
    """Return, as JSON holds it, what losses depend on: the checkpoint's content and the arguments."""
    with ckpt_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return json.loads(json.dumps({**arguments, "checkpoint": digest}, default=_described))


def _described(value: Any) -> str:
    """Describe an object in the same words in every process: without its address in memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _known(folder: Path, setting: Mapping[str, Any]) -> Any:
    """Return what an earlier call of the same setting has measured."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "batch_size.json"
    if path.is_file():
        known = json.loads(path.read_text())
        if known["setting"] == setting:
            return known["losses"]
    return {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure for a run of the command line: ``ckpt_path=RUN`` and arguments of ``measure_batch_size``."""
    from lightning_ga.app.branches import branch_from  # with Hydra, which the library does without

    branch_from(list(sys.argv[1:] if arguments is None else arguments), measure_batch_size, description=str(__doc__))


if __name__ == "__main__":
    from lightning_ga.app.terminal import Interrupted

    try:
        main()
    except (UserError, Interrupted) as error:
        print(f"Error: {printable(str(error))}", file=sys.stderr)
        sys.exit(getattr(error, "code", 1))
