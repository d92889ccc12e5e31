"""Everything in a configuration by its full key."""

from collections.abc import Iterator, Mapping
from typing import Any


def walk(content: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every mapping, list and value, however deep, with its full key; what contains others comes before them.

    Examples:
        >>> list(walk({"a": {"b": [1]}}))[1:]
        [('a', {'b': [1]}), ('a.b', [1]), ('a.b[0]', 1)]
    """
    yield where, content
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from walk(value, f"{where}.{key}".lstrip("."))
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from walk(value, f"{where}[{index}]")


def settings(content: Any) -> dict[str, Any]:
    """The values by their full keys; a list is one value."""
    return {key: value for key, value in walk(content) if not isinstance(value, Mapping) and "[" not in key}
