"""The error for a training of which not even the smallest step fits: what it takes, what would do, what holds it."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ga.errors import UserError
from lightning_ga.plan.attribution import Attribution
from lightning_ga.plan.units import sufficient, written_like

ADVICE = "train in a lower precision, use activation checkpointing or a smaller model, or shard it over more devices"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What leaves a step too little, what helps besides more memory, what would be enough, and how bytes are told."""

    bound: str = "the device"
    advice: str = ADVICE
    enough: Callable[[int], str | None] = lambda _: None
    amount: Callable[[int], str] = "{:,} bytes".format

    @classmethod
    def of_budget(cls, value: int | float | str | None, total_bytes: int | None) -> "Shortage":
        """Return what is said of a memory budget, in the units that the user wrote; without one, of the device."""
        if value is None:
            return cls()

        def enough(needed: int) -> str | None:
            least = sufficient(value, needed, total_bytes)
            return None if least is None else f"memory_budget={least!r} is enough"

        return cls(f"memory_budget={value!r}", ADVICE, enough, lambda count: written_like(value, count))

    def error(
        self, what: str, needed: int, budget: int, *, measured: bool = False, holders: Attribution | None = None
    ) -> UserError:
        """Return the error that something takes so many bytes; if ``measured``, as many are enough."""
        enough = self.enough(needed) if measured else None
        way_out = f"{enough}, or {self.advice}" if enough else f"more memory is needed; {self.advice}"
        told = f" As it was recorded: {holders.sentence(self.amount)}" if holders else ""
        return UserError(
            f"{what} {self.amount(needed)}, and {self.bound} leaves {self.amount(budget)}: {way_out}.{told}"
        )
