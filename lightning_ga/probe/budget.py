"""The memory that a training may take, and the error if not even its smallest step fits in it."""

from lightning_ga.errors import UserError
from lightning_ga.plan.attribution import Attribution
from lightning_ga.plan.units import least_budget, parse_budget


class Budget:
    """A memory budget, or what a device has free without one."""

    advice = (
        "train in a lower precision, use activation checkpointing or a smaller model, or shard it over more devices"
    )

    def __init__(self, value: int | float | str | None, total_bytes: int | None) -> None:
        self.asked = parse_budget(value, total_bytes)  # bytes; ``None`` is what the device has free
        self.bound = "the device" if value is None else f"memory_budget={value!r}"  # what leaves a step too little
        self._total_bytes = total_bytes  # of the device, to which shares refer

    def enough(self, needed: int) -> str | None:
        """Say what would leave so many bytes; ``None`` if nothing does, or nothing is known."""
        if self.asked is None or (self._total_bytes is not None and needed > self._total_bytes):
            return None
        return f"memory_budget={least_budget(needed)!r} is enough"

    def shortage(
        self, what: str, needed: int, left: int, *, measured: bool = False, holders: Attribution | None = None
    ) -> UserError:
        """Return the error that something takes more bytes than are left; if ``measured``, as many are enough."""
        enough = self.enough(needed) if measured else None
        way_out = f"{enough}, or {self.advice}" if enough else f"more memory is needed; {self.advice}"
        told = f" As it was recorded: {holders.sentence()}" if holders else ""
        return UserError(f"{what} {needed:,} bytes, and {self.bound} leaves {left:,} bytes: {way_out}.{told}")
