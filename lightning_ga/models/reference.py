"""What the reference models share: an optimizer, its schedule, and training curves by optimizer step.

Stock Lightning logs the value of a window's last micro-batch; here a logged ``train/…`` is the mean over the
window so far, so that the curve by optimizer step is the same for every micro-batch. At the end of an epoch it is
the mean over the epoch, for checkpoints, for early stopping and as the result of a run.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from timm.optim import param_groups_weight_decay  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics import Metric

from lightning_ga.compat.intervals import optimizer_steps
from lightning_ga.errors import UserError
from lightning_ga.plan.units import counted

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
MakeScheduler = Callable[..., torch.optim.lr_scheduler.LRScheduler]


class SampleMean(Metric):
    """Mean of values that are means over some samples each.

    ``torchmetrics.MeanMetric`` leaves NaN out, so that a training that diverged looks well; told not to, it
    forgets the weights (1.9).

    Examples:
        >>> mean = SampleMean()
        >>> mean.update(torch.tensor(1.0), 3)
        >>> mean.update(torch.tensor(2.0), 1)
        >>> mean.compute()
        tensor(1.2500)
    """

    full_state_update = False
    total: Tensor
    samples: Tensor

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, value: Tensor, samples: int) -> None:
        """Count a mean over so many samples."""
        self.total += value * samples
        self.samples += samples

    def compute(self) -> Tensor:
        """The mean over all samples."""
        return self.total / self.samples


class ReferenceModule(LightningModule):
    """An optimizer, a schedule by optimizer step, and means over windows and epochs.

    Args:
        measured: Names of the values that :meth:`record` is given.
        optimizer: Takes the parameters and returns an optimizer; Adam at 1e-3 when left out.
        lr_scheduler: Takes the optimizer and returns a scheduler, stepped once per optimizer step.
            If it has an argument ``total_steps``, it is given the optimizer steps of the whole run.

    Attributes:
        decay_norms: Whether weight decay counts for all parameters; if not, then for none of norms and biases, by
            timm's parameter groups. Set it before training.
    """

    decay_norms = True

    def __init__(
        self, measured: Sequence[str], optimizer: MakeOptimizer | None = None, lr_scheduler: MakeScheduler | None = None
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer or torch.optim.Adam
        self.make_scheduler = lr_scheduler
        # A sync would be a collective on every micro-batch: rank 0 shows the curve of its own share.
        self.of_window = nn.ModuleDict({name: SampleMean(sync_on_compute=False) for name in measured})
        self.of_epoch = nn.ModuleDict({name: SampleMean() for name in measured})
        self._starts_window = True
        self._saved_ends: list[int | None] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the ends of saved schedules, which restoring puts in place of those that this training needs."""
        self._saved_ends = [state.get("total_steps") for state in checkpoint.get("lr_schedulers", ())]
        saved = [len(state["param_groups"]) for state in checkpoint.get("optimizer_states", ())]
        if self._trainer is None or self.trainer.state.fn != "fit" or not saved or not saved[0]:
            return
        groups = len(self.parameter_groups())
        if saved[0] != groups:
            raise UserError(
                f"The checkpoint has parameters in {counted(saved[0], 'group')}, this training in {groups}: give the "
                "optimizer.decay_norms and weight_decay of its run, or start from its weights with model.init_from=…"
            )

    def on_train_epoch_start(self) -> None:
        """Reset the means of the epoch."""
        for mean in means(self.of_epoch).values():
            mean.reset()

    def record(self, values: Mapping[str, Tensor], items: int) -> None:
        """Count values of a micro-batch, each a mean over so many items; log the means of the window so far."""
        window, epoch = means(self.of_window), means(self.of_epoch)
        if self._starts_window:
            for mean in window.values():
                mean.reset()
            self._starts_window = False
        for name, value in values.items():
            window[name].update(value.detach(), items)
            epoch[name].update(value.detach(), items)
        curves = {f"train/{name}": mean.compute() for name, mean in window.items()}
        self.log_dict(curves, on_step=True, on_epoch=False, batch_size=items)

    def epoch_means(self, *, over_ranks: bool = False) -> dict[str, Tensor]:
        """Return the means over the epoch so far, of this rank's items, or of all, for which all ranks call this."""
        seen = {name: mean for name, mean in means(self.of_epoch).items() if mean.update_called}
        return {name: mean.compute() if over_ranks else mean.total / mean.samples for name, mean in seen.items()}

    def on_train_epoch_end(self) -> None:
        """Set the values of training to the means over the epoch."""
        self._log_epoch()

    def on_validation_epoch_end(self) -> None:
        """Log the means over the epoch, as at its end.

        Checkpoints and early stopping may read them here, in the middle of a fit.
        """
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._log_epoch()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the next micro-batch start a window."""
        self._starts_window = True

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and its scheduler by optimizer step if there is one."""
        optimizer = self.make_optimizer(self.parameter_groups())
        if self.make_scheduler is None:
            return optimizer
        arguments = {}
        # A partial has no signature if it was given an argument that its function does not take.
        function = getattr(self.make_scheduler, "func", self.make_scheduler)
        if "total_steps" in inspect.signature(function).parameters:
            arguments["total_steps"] = finite_steps(self.trainer)
        scheduler = self.make_scheduler(optimizer, **arguments)
        if isinstance(scheduler, OneCycleLR):
            for end in self._saved_ends:
                refuse_longer(scheduler, end)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return what the optimizer is given: all parameters, or those of norms and biases apart, without decay."""
        if self.decay_norms:
            return [{"params": list(self.parameters())}]
        decay = inspect.signature(self.make_optimizer).parameters.get("weight_decay")
        if decay is None:
            raise UserError("optimizer.decay_norms=false needs an optimizer that has a weight_decay.")
        net: Any = getattr(self, "net", self)
        undecayed = net.no_weight_decay() if hasattr(net, "no_weight_decay") else ()  # timm's tables of positions
        groups: list[dict[str, Any]] = param_groups_weight_decay(net, decay.default, no_weight_decay_list=undecayed)
        return groups

    def _log_epoch(self) -> None:
        measured = {f"train/{name}": value for name, value in self.epoch_means(over_ranks=True).items()}
        self.log_dict(measured, logger=False, on_step=False, on_epoch=True, sync_dist=True)  # else Lightning warns


def means(metrics: nn.ModuleDict) -> dict[str, SampleMean]:
    """Return the means in a module by their names."""
    return {name: cast(SampleMean, metric) for name, metric in metrics.items()}


def finite_steps(trainer: Any) -> int:
    """Return the optimizer steps of the whole training, for a schedule that needs its end."""
    steps = optimizer_steps(trainer)
    if math.isinf(steps):
        endless = (
            f"trainer.max_epochs={trainer.max_epochs} has" if trainer.max_epochs == -1 else "The training data have"
        )
        raise UserError(
            f"{endless} no end, and the learning-rate schedule needs one: give trainer.max_epochs=… or "
            "trainer.max_steps=…, or choose lr_scheduler=none."
        )
    return int(steps)


def refuse_longer(scheduler: OneCycleLR, end: int | None) -> None:
    """Refuse to resume a OneCycle schedule past its end: it would fail in the middle of the training."""
    if end is not None and end < scheduler.total_steps:
        raise UserError(
            f"OneCycleLR was made for {end} optimizer steps and cannot be prolonged to {scheduler.total_steps}: keep "
            "trainer.max_epochs as it was, or train from the start, without ckpt_path."
        )
