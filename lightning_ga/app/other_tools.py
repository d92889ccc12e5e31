"""Keys of other programs, in the words of this command line. Nothing here imports torch.

``words.json`` lists it: names of timm's ``train.py``, lightning-hydra-template, LightningCLI and Ultralytics, and the
plugins of Hydra.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Groups = Mapping[str, Sequence[str]]
TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
WORDS = {theirs: ours for ours, names in TABLES["words"].items() for theirs in names}  # {} stands for the value
PLUGINS = TABLES["plugins"]  # how each is installed, by group and option
SECTIONS = TABLES["sections_here"]
OWN_KEYS = TABLES["keys_here"]
OF_TIMM = {"model": "model=timm model.name={}", "optimizer": "optimizer=timm optimizer.name={}"}


def config_folder() -> Path:
    """``conf``: inside the package in a wheel, beside it in the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    if inside.is_dir():
        return inside
    return package.parent / "conf"


def in_our_words(typed: str, value: str, groups: Groups) -> str | None:
    """Return what to type here for a key or option of another program; ``None`` for names that are not known."""
    ours = WORDS.get(f"{typed}={value}".lower()) or WORDS.get(typed)
    if ours is None:
        for theirs, section in TABLES["sections"].items():
            if typed.startswith(f"{theirs}."):
                ours = section + typed.removeprefix(theirs) + "={}"
    if typed in ("model", "data") and re.fullmatch(r"[^\W\d]\w*\.[^/]*", value):
        ours = f"{typed}=own {typed}._target_={{}}"
    elif typed in groups:
        ours = _option(typed, value, groups)
    elif ours == "optimizer={}":
        ours = _option("optimizer", value, groups)
    if ours is None:
        return None
    return ours.replace("{}", value or "VALUE")


def _option(group: str, value: str, groups: Groups) -> str:
    """Return the option of a group, or timm's network or optimizer of that name."""
    if value.lower() in groups.get(group, ()):
        return f"{group}={value.lower()}"
    return OF_TIMM.get(group, f"{group}={{}}")
