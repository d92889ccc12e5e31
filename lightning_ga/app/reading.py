"""Read files that may come from anybody: regular ones alone, and no more of them than such a file holds."""

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped] # it ships no types
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.errors import UserError

MOST = 1_000_000  # characters of a configuration, its aliases written out
EACH = 10  # characters that a key, a value, a list or a mapping counts at least
DEEPEST = 50


def read_yaml(path: Path) -> Any:
    """What a YAML file holds, with its interpolations as they are written."""
    try:
        return OmegaConf.to_container(OmegaConf.create(checked_yaml(path) or "{}"))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}.") from error


def checked_yaml(path: Path) -> str:
    """The text of a YAML file whose aliases do not make it huge: each stands for all that its anchor holds."""
    if not path.is_file() or path.stat().st_size > MOST:
        raise UserError(f"{str(path)!r} is not a regular file of at most {MOST:,} bytes.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8: save it in that encoding.") from error
    sizes: dict[str | None, int] = {}
    begun: list[tuple[str | None, int]] = [(None, 0)]  # anchors of lists and mappings, and their sizes so far
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, EACH))
                if len(begun) > DEEPEST:
                    raise UserError(f"{str(path)!r} is nested more than {DEEPEST} levels deep.")
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = begun.pop()
            elif isinstance(event, yaml.ScalarEvent):
                anchor, size = event.anchor, EACH + len(event.value)
            elif isinstance(event, yaml.AliasEvent):
                anchor, size = None, sizes.get(event.anchor, MOST)  # one within what it stands for has no end
            else:
                continue
            sizes[anchor] = size
            begun[-1] = begun[-1][0], begun[-1][1] + size
            if begun[-1][1] > MOST:
                raise UserError(
                    f"{str(path)!r} is too large with its aliases written out: more than {MOST:,} characters."
                )
    except yaml.YAMLError:
        pass  # told by what reads the content
    return text


def read_json(path: Path, default: Any, missing: list[str] | None = None) -> Any:
    """A JSON file of the default's kind, or the default; one that cannot be read is told in ``missing``."""
    if not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if default is None or isinstance(content, type(default)):
            return content
    except (ValueError, RecursionError, OSError):  # torn, as when its run was killed
        pass
    if missing is not None:
        missing.append(path.name)
    return default
