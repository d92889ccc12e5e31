"""The error for a training of which not even the smallest step fits: what it takes, what would do, what holds it."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_ga.errors import UserError
from lightning_ga.plan.attribution import Attribution
from lightning_ga.plan.budget import sufficient, written_like

ADVICE = "train in a lower precision, use activation checkpointing or a smaller model, or shard it over more devices"


def _exactly(count: int) -> str:
    return f"{count:,} bytes"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a step has to fit in, and how to say that it does not.

    Attributes:
        bound: What leaves too little.
        advice: What helps besides more memory.
        enough: Returns, for the bytes that are needed, what would do; ``None`` where nothing would.
        amount: Turns bytes into text.
    """

    bound: str = "the device"
    advice: str = ADVICE
    enough: Callable[[int], str | None] = lambda _: None
    amount: Callable[[int], str] = _exactly

    @classmethod
    def of_budget(cls, value: int | float | str | None, total_bytes: int | None) -> "Shortage":
        """Return what is said of a memory budget, in the units that the user wrote.

        Args:
            value: The budget; ``None`` where the device itself is the bound.
            total_bytes: Memory of the device, to which a share refers.
        """
        if value is None:
            return cls()

        def enough(needed: int) -> str | None:
            least = sufficient(value, needed, total_bytes)
            return None if least is None else f"memory_budget={least!r} is enough"

        return cls(f"memory_budget={value!r}", ADVICE, enough, lambda count: written_like(value, count))

    def of_state(self, needed: int, budget: int) -> UserError:
        """Return the error where model and optimizer alone are too much, and no step could tell more.

        Args:
            needed: Bytes that they take.
            budget: Bytes that there are.
        """
        return self._error("The model and its optimizer alone take", needed, budget, None)

    def of_step(
        self, samples: int, needed: int, budget: int, *, measured: bool, holders: Attribution | None
    ) -> UserError:
        """Return the error for the smallest step that runs.

        Args:
            samples: Its micro-batch size.
            needed: Bytes that it takes.
            budget: Bytes that there are.
            measured: Whether it ran to its end, so that as many bytes are enough.
            holders: What holds them.
        """
        least = "" if measured else " at least"
        what = f"A training step with micro_batch_size={samples}, the smallest that runs, takes{least}"
        return self._error(what, needed, budget, self.enough(needed) if measured else None, holders)

    def _error(
        self, what: str, needed: int, budget: int, enough: str | None, holders: Attribution | None = None
    ) -> UserError:
        way_out = f"{enough}, or {self.advice}" if enough else f"more memory is needed; {self.advice}"
        told = f" As it was recorded: {holders.sentence(self.amount)}" if holders else ""
        return UserError(
            f"{what} {self.amount(needed)}, and {self.bound} leaves {self.amount(budget)}: {way_out}.{told}"
        )
