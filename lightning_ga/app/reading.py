"""Read files that may come from anybody: regular ones alone, and no more of them than such a file holds."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped] # it ships no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.errors import UserError

MOST = 1_000_000  # characters of a configuration, its aliases written out
EACH = 10  # characters that a key, a value, a list or a mapping counts at least
DEEPEST = 50


def text_of(path: Path) -> str:
    """The text of a file, with signs in place of bytes that are not UTF-8; nothing where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def read_yaml(path: Path) -> Any:
    """What a YAML file holds, with its interpolations as they are written."""
    try:
        return OmegaConf.to_container(OmegaConf.create(checked_yaml(path) or "{}"))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}.") from error


def checked_yaml(path: Path) -> str:
    """The text of a YAML file that is no larger, and no deeper, than a configuration, its aliases written out."""
    if not path.is_file() or path.stat().st_size > MOST:
        raise UserError(f"{str(path)!r} is not a regular file of at most {MOST:,} bytes.")
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        loader.name = str(path)  # for its errors
        size, depth = extent(loader.get_single_node(), {})
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8: save it in that encoding.") from error
    except RecursionError:
        size, depth = 0, DEEPEST + 1
    if size > MOST or depth > DEEPEST:
        raise UserError(
            f"{str(path)!r} is too large, with its aliases written out: a configuration has at most {MOST:,} "
            f"characters and {DEEPEST} levels."
        )
    return text


def extent(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Characters and levels of a YAML node; an alias is the node that it stands for, and known."""
    if id(node) not in known:
        known[id(node)] = MOST, DEEPEST  # of one that is within itself
        if isinstance(node, yaml.CollectionNode):
            parts = [part for one in node.value for part in (one if isinstance(one, tuple) else (one,))]
            sizes, depths = zip((0, 0), *(extent(part, known) for part in parts))
            known[id(node)] = EACH + sum(sizes), 1 + max(depths)
        else:
            known[id(node)] = EACH + len(getattr(node, "value", "")), 1
    return known[id(node)]


def read_json(path: Path, default: Any, missing: list[str] | None = None) -> Any:
    """A JSON file of the default's kind, or the default; one that cannot be read is told in ``missing``."""
    with suppress(ValueError, RecursionError):  # torn, as when its run was killed
        content = json.loads(text_of(path))
        if default is None or isinstance(content, type(default)):
            return content
    if missing is not None and path.is_file():
        missing.append(path.name)
    return default
