"""Numbers with units, as people read them. Pure."""


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
