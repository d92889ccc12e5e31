"""Learning rates, and Adam's β₂, that follow the effective batch.

They are scaled from a window's start to its optimizer step. Between steps, and in checkpoints, they are what the user's
scheduler has set: a scheduler, and a resume, know nothing of the scale.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_ga.compat import rates
from lightning_ga.errors import UserError
from lightning_ga.plan.rates import RateRule


class WindowRates:
    """Scales what optimizers read, a window at a time."""

    def __init__(self, trainer: Any, rule: RateRule, name: str) -> None:
        self._trainer, self._rule = trainer, rule
        self._name = name  # of the argument that scales; none: they are only logged
        self._before: list[tuple[dict[str, Any], str, Any, Any]] = []  # group, key, the scheduler's value, and ours

    def following(self) -> AbstractContextManager[None]:
        """Return a context in which schedulers meet their own values; refuse optimizers without what is scaled."""
        if not self._name:
            return nullcontext()
        key = "betas" if self._rule.scale_beta2 else "lr"
        if any(group.get(key) is None for group in rates.groups(self._trainer)):
            names = ", ".join(type(optimizer).__name__ for optimizer in self._trainer.optimizers)
            raise UserError(f"{self._name} scales {key!r}, and {names} has none: leave it out.")
        return rates.before_schedulers(self._trainer, self.end_window)

    def begin_window(self, batch: int, recipe: int, factor: float) -> None:
        """Scale the values of every parameter group, learning rates by the ``factor`` of a schedule too, and log."""
        self.give_back()
        factor *= self._rule.factor(batch, recipe)
        for group in rates.groups(self._trainer) if self._name else ():
            self._set(group, "lr", group["lr"] * factor)
            if self._rule.scale_beta2:
                beta1, beta2 = group["betas"]
                self._set(group, "betas", (beta1, self._rule.beta2(beta2, batch, recipe)))
        self._log(batch)

    def end_window(self) -> None:
        """Give schedulers their own values, and refuse others that wrote the same ones since the window's start."""
        for number, (group, key, _, ours) in enumerate(self._before):
            if group[key] is not ours and group[key] != ours:
                owners = [self._trainer.lightning_module, *self._trainer.callbacks[1:]]
                others = ", ".join(type(owner).__name__ for owner in owners)
                raise UserError(
                    f"{self._name} set {key}={ours} of parameter group {number}, and a hook within the window set "
                    f"{group[key]} (one of {others}): two hands write the same value. Let a scheduler set it, which is "
                    "multiplied, or leave one of the two out."
                )
        self.give_back()

    def give_back(self) -> None:
        """Give groups back what schedulers had set."""
        for group, key, before, _ in self._before:
            group[key] = before
        self._before = []

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint from within a window keep what schedulers had set."""
        saved = dict(zip(map(id, rates.groups(self._trainer)), rates.saved_groups(checkpoint)))
        for group, key, before, _ in self._before:
            if id(group) in saved:
                saved[id(group)][key] = before

    def _log(self, batch: int) -> None:
        """Give loggers effective batch, factor and the learning rate of each parameter group."""
        values: dict[str, float] = {
            "effective_batch_size": batch,
            "accumulate_grad_batches": int(self._trainer.accumulate_grad_batches),
        }
        for number, group in enumerate(rates.groups(self._trainer)):
            if group.get("lr") is not None:
                values[f"learning_rate/{number}" if number else "learning_rate"] = float(group["lr"])
        rates.log_step(self._trainer, values)

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        self._before.append((group, key, group[key], value))
        group[key] = value
