"""The memory that a step may use, and the error that a step needs more.

Tested in tests/integration/test_probe.py and tests/probe/test_probed_loop.py.
"""

from lightning_ga.errors import UserError
from lightning_ga.plan.records import Attribution
from lightning_ga.plan.units import least_budget, parse_budget


class DoesNotFitError(UserError):
    """A step of the fewest samples takes more bytes than are left: ``needed``, or more if that was not measured."""

    def __init__(self, sentence: str, needed: int, left: int) -> None:
        super().__init__(sentence)
        self.needed = needed
        self.left = left


class Budget:
    """A memory budget, or what a device has free without one."""

    def __init__(
        self, value: int | float | str | None, total_bytes: int | None, *, name: str = "memory_budget", advice: str = ""
    ) -> None:
        self.asked = parse_budget(value, total_bytes, name=name)  # bytes; ``None`` is what the device has free
        self._name = name  # of the argument
        self._bound = "the device" if value is None else f"{name}={value!r}"  # what leaves a step too little
        self._total_bytes = total_bytes  # of the device, to which shares refer
        self._advice = f"{advice}train in a lower precision, use a smaller model, or shard it over more devices"

    def shortage(
        self, what: str, needed: int, left: int, *, measured: bool = False, holders: Attribution | None = None
    ) -> DoesNotFitError:
        """Return the error that something takes more bytes than are left; if ``measured``, as many are enough."""
        on_device = self._total_bytes is None or needed <= self._total_bytes
        remedy = f"more memory is needed; {self._advice}"
        if measured and self.asked is not None and on_device:
            remedy = f"{self._name}={least_budget(needed)!r} is enough, or {self._advice}"
        holding = "" if holders is None else f" As it was recorded: {holders.sentence()}"
        sentence = f"{what} {needed:,} bytes, and {self._bound} leaves {left:,} bytes: {remedy}.{holding}"
        return DoesNotFitError(sentence, needed, left)
