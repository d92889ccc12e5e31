"""Numbers with units, as people write and read them; above all a memory budget.

A budget is in bytes, a share of the device (0.8 or ``"80%"``), or text with a unit: ``"10GiB"`` is 10 × 1024³ bytes,
``"512 MB"`` is 512 × 1000².
"""

import re
from math import ceil, floor, log10
from numbers import Integral, Real

from lightning_ga.errors import UserError

_PREFIXES = " KMGT"  # of powers of 1000, and of 1024 with an i behind
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([KMGT]I?)?B?|(%))\s*", re.IGNORECASE)
LEAST_BYTES = 1000  # that anybody means by a number without a unit


def parse_budget(
    value: object, total_bytes: int | None = None, *, name: str = "memory_budget", least: int = 1
) -> int | None:
    """Return the bytes of a memory budget; ``None`` stays ``None``, and a share needs the device's total.

    A number below ``least`` was meant in another unit.
    """
    if value is None:
        return None
    amount = _read_amount(value, total_bytes)
    if amount is None or amount < 1:
        rule = "a whole number of bytes of at least 1, or a text such as '10GiB' or '512 MB'"
        if total_bytes is not None:
            rule = f"a fraction above 0 and up to 1, {rule} or 80%"
        raise UserError(f"{name}={value!r} must be {rule}.")
    if amount < least:
        number = str(value).strip(" kKmMiIbB")
        raise UserError(f"{name}={value} is a number of bytes: write {name}='{number}GiB' for so many GiB.")
    return amount


def _read_amount(value: object, total: int | None) -> int | None:
    """Return the bytes of a budget; ``None`` if it cannot be read."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):  # numpy's are too
        return int(value)
    if isinstance(value, Real):
        if total is None or not 0 < float(value) <= 1:
            return None
        return int(float(value) * total)
    found = _AMOUNT.fullmatch(str(value))
    if found is None:
        return None
    number, unit, percent = found.groups()
    if percent:
        return _read_amount(float(number) / 100, total)
    if not unit and "." in number and float(number) <= 1:
        return _read_amount(float(number), total)
    prefix, binary, _ = (unit or " ").upper().partition("I")
    return round(float(number) * (1024.0 if binary else 1000.0) ** _PREFIXES.index(prefix))


def least_budget(needed: int) -> str:
    """Return the least budget that leaves so many bytes, rounded up to three digits, as text that is read here."""
    power = min(max(1, needed).bit_length() - 1, 49) // 10
    amount = needed / 1024**power
    if not power:
        return f"{ceil(amount)}B"
    shift = 10 ** max(0, 2 - floor(log10(amount)))
    return f"{ceil(amount * shift) / shift:g}{_PREFIXES[power]}iB"


def format_bytes(count: float) -> str:
    """Return bytes in the largest binary unit that keeps a digit before the point."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for prefix in "KMG":
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {prefix}iB"
    return f"{count / 1024:.1f} TiB"


def counted(count: int, thing: str, plural: str = "s") -> str:
    """Return a number of things."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{plural}"
