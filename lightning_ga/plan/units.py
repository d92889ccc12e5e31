"""Numbers with units, as people write and read them; above all a memory budget.

A budget is in bytes, a share of the device (0.8 or ``"80%"``), or text with a unit: ``"10GiB"`` is 10 × 1024³ bytes,
``"512 MB"`` is 512 × 1000².
"""

import re
from decimal import Decimal
from math import ceil, floor, log10
from numbers import Integral, Real

from lightning_ga.errors import UserError

_UNITS = {
    "": 1,
    **{prefix: 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}I": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([KMGT]I?)?B?|(%))\s*", re.IGNORECASE)
LEAST_BYTES = 1000  # that anybody means by a number without a unit
_DIGITS = 3  # of an amount that is proposed


def parse_budget(value: int | float | str | None, total_bytes: int | None = None) -> int | None:
    """Return the bytes of a memory budget; ``None`` stays ``None``, and a share needs the device's total.

    Examples:
        >>> parse_budget("10GiB"), parse_budget(0.5, 8000), parse_budget("80%", 1000)
        (10737418240, 4000, 800)
    """
    return None if value is None else require_bytes("memory_budget", value, total_bytes)


def require_bytes(name: str, value: object, total_bytes: int | None = None, *, least: int = 1) -> int:
    """Return an amount of memory in bytes; one below ``least`` was meant in another unit.

    Examples:
        >>> require_bytes("device_memory", "80 GB")
        80000000000
    """
    amount = _read_amount(value, total_bytes)
    if amount is None or amount < 1:
        share = "a fraction above 0 and up to 1, " if total_bytes is not None else ""
        raise UserError(
            f"{name}={value!r} must be {share}a whole number of bytes of at least 1, or a text such as '10GiB' or "
            f"'512 MB'{' or 80%' if total_bytes is not None else ''}."
        )
    if amount < least:
        raise UserError(f"{name}={value} is a number of bytes: write {name}='{value}GiB' for so many GiB.")
    return amount


def _read_amount(value: object, total: int | None) -> int | None:
    """Return the bytes of a budget; ``None`` if it cannot be read."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):  # numpy's are too
        return int(value)
    if isinstance(value, Real):
        return int(float(value) * total) if total is not None and 0 < float(value) <= 1 else None
    found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    number, unit, percent = found.groups()
    if percent:
        return _read_amount(float(number) / 100, total)
    scale: int = _UNITS[(unit or "").upper()]
    return round(float(number) * scale)


def sufficient(value: int | float | str, needed: int, total_bytes: int | None = None) -> int | float | str | None:
    """Return the least budget that leaves ``needed`` bytes, rounded up to three digits as the user wrote ``value``.

    ``None`` if the whole device is too little.

    Examples:
        >>> sufficient("20MiB", 40_400_000), sufficient(1000, 1234), sufficient(0.1, 1234, 8000)
        ('38.6MiB', 1234, 0.155)
    """
    if total_bytes is not None and needed > total_bytes:
        return None
    if isinstance(value, Integral):
        return needed
    if not isinstance(value, str):
        return None if total_bytes is None else min(1.0, _rounded_up((needed + 1) / total_bytes))  # a share is cut off
    found = _AMOUNT.fullmatch(value)
    if found is None or (found[3] and total_bytes is None):
        return None
    number, unit, percent = found.groups()
    scale = (total_bytes or 0) / 100 if percent else _UNITS[(unit or "").upper()]
    amount = format(Decimal(repr(_rounded_up((needed + bool(percent)) / scale))).normalize(), "f")
    return f"{amount}{value.strip()[len(number) :]}"


def written_like(value: int | float | str, count: int) -> str:
    """Return bytes in the unit of a budget, rounded up.

    Examples:
        >>> written_like("20MiB", 40_400_000), written_like(1000, 1234), written_like(0.5, 2**20)
        ('38.6MiB', '1,234 bytes', '1.0 MiB')
    """
    if isinstance(value, Integral):
        return f"{count:,} bytes"
    found = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    return format_bytes(count) if found is None or found[3] else str(sufficient(value, max(1, count)))


def _rounded_up(amount: float) -> float:
    """Round up to three digits.

    Examples:
        >>> _rounded_up(38.52), _rounded_up(1234.5)
        (38.6, 1235)
    """
    decimals = max(0, _DIGITS - 1 - floor(log10(amount)))
    return ceil(amount * 10**decimals) / 10**decimals if decimals else ceil(amount)


def format_bytes(count: float) -> str:
    """Return bytes in the largest binary unit that keeps a digit before the point.

    Examples:
        >>> format_bytes(512), format_bytes(3 * 2**29)
        ('512 B', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def counted(count: int, thing: str) -> str:
    """Return a number of things.

    Examples:
        >>> counted(1, "trial"), counted(3, "trial")
        ('1 trial', '3 trials')
    """
    return f"{count} {thing}{'s' * (count != 1)}"
