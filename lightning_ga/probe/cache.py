"""Remember what probes found between runs: one small JSON file for each kind of training step.

The files lie in the user's cache folder (``$XDG_CACHE_HOME/lightning_ga``, else ``~/.cache/lightning_ga``) and may be
deleted at any time. A file that cannot be read or written costs a probe and a warning, never the run.
"""

import json
import os
import secrets
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_ga.plan.checkpoint import read_probe
from lightning_ga.plan.records import ProbeResult


def remembered(step: Mapping[str, Any]) -> ProbeResult | None:
    """Return what a probe of this step found; ``None``, with a warning if its file cannot be read."""
    path = _path(step)
    try:
        return read_probe(json.loads(path.read_text(encoding="utf-8"))["probe"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _warn(f"{path} cannot be read ({type(error).__name__}: {error}), so the limit is looked for again.")
        return None


def remember(step: Mapping[str, Any], result: ProbeResult) -> None:
    """Keep a result, whole or not at all: another file is written, which then takes the place of the old one."""
    path = _path(step)
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"step": step, "probe": asdict(result)}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        _warn(f"{path} cannot be written ({type(error).__name__}: {error}), so the limit is not remembered.")


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache.

    Examples:
        >>> cache_folder().name
        'lightning_ga'
    """
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "lightning_ga"


def _path(step: Mapping[str, Any]) -> Path:
    digest = sha256(json.dumps(step, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{digest[:32]}.json"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
