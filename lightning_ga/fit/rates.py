"""Learning rates, and Adam's β₂, that follow the effective batch.

They are scaled from a window's start to its optimizer step. Between steps, and in checkpoints, they are what the user's
scheduler has set: a scheduler, and a resume, know nothing of the scale.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_ga.compat import intervals
from lightning_ga.errors import UserError
from lightning_ga.plan.config import RateRule

Values = dict[str, Any]


class WindowRates:
    """Scales what optimizers read, a window at a time; without the ``name`` of an argument for that, it only logs."""

    def __init__(self, trainer: Any, rule: RateRule, name: str) -> None:
        self._trainer, self._rule, self._name = trainer, rule, name
        self._keys = ("lr", "betas") if rule.scale_beta2 else ("lr",)
        self._before: list[tuple[Values, Values]] = []  # of each parameter group: what schedulers have set, and ours

    def following(self) -> AbstractContextManager[None]:
        """Return a context in which schedulers meet their own values; refuse optimizers without what is scaled."""
        if not self._name:
            return nullcontext()
        if lacks := next((key for group in self._groups for key in self._keys if group.get(key) is None), None):
            kind = type(self._trainer.optimizers[0]).__name__
            raise UserError(f"{self._name} scales {lacks!r}, and {kind} has none: leave it out.")
        return intervals.before_schedulers(self._trainer, self._end_window)

    def begin_window(self, batch: int, recipe: int, factor: float) -> None:
        """Scale the values of every parameter group, learning rates by the ``factor`` of a schedule too, and log."""
        self.give_back()
        for group in self._groups if self._name else ():
            before = {key: group[key] for key in self._keys}
            self._rule.scale(group, group["lr"] * factor if factor != 1.0 else group["lr"], batch, recipe)
            self._before.append((before, {key: group[key] for key in self._keys}))
        values = {"effective_batch_size": batch, "accumulate_grad_batches": int(self._trainer.accumulate_grad_batches)}
        rates = {
            f"learning_rate/{n}" if n else "learning_rate": group.get("lr") for n, group in enumerate(self._groups)
        }
        intervals.log_step(self._trainer, {**values, **rates})

    def _end_window(self) -> None:
        """Give schedulers their own values, and refuse others that wrote the same ones since the window's start."""
        for number, (group, (_, ours)) in enumerate(zip(self._groups, self._before)):
            if key := next(
                (key for key in self._keys if group[key] is not ours[key] and group[key] != ours[key]), None
            ):
                others = self._trainer.callbacks[1:]  # AutoAccumulate is the first
                owners = ", ".join(type(each).__name__ for each in (self._trainer.lightning_module, *others))
                raise UserError(
                    f"{self._name} set {key}={ours[key]} of parameter group {number}, and a hook within the window set "
                    f"{group[key]} (one of {owners}): two hands write the same value. Let a scheduler set it, which is "
                    "multiplied, or leave one of the two out."
                )
        self.give_back()

    def give_back(self) -> None:
        """Give groups back what schedulers had set."""
        for group, (before, _) in zip(self._groups, self._before):
            group.update(before)
        self._before = []

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint from within a window keep what schedulers had set."""
        saved = [group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]]
        for group, (before, _) in zip(saved, self._before):
            group.update(before)

    @property
    def _groups(self) -> list[Values]:
        return [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
