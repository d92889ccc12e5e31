"""What users of other programs type, in the words of this command line. Nothing here imports torch.

``words.json`` lists it: names of timm's ``train.py``, lightning-hydra-template, LightningCLI and Ultralytics, and the
plugins of Hydra.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_ga.errors import UserError

Groups = Mapping[str, Sequence[str]]
TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
WORDS = {theirs: ours for ours, names in TABLES["words"].items() for theirs in names}  # {} stands for the value
PLUGINS = TABLES["plugins"]  # how each is installed, by group and option
SECTIONS = TABLES["sections_here"]
OWN_KEYS = TABLES["keys_here"]
MAY_TAKE_A_VALUE = TABLES["options_with_a_value_here"]  # of Hydra
OPTIONS = (*TABLES["options_here"], *MAY_TAKE_A_VALUE)  # of Hydra and of this program
LIBRARIES = ("lightning", "pytorch_lightning", "torch", "lightning_ga")  # whose classes are not the user's own
OF_TIMM = {"model": "model=timm model.name={}", "optimizer": "optimizer=timm optimizer.name={}"}


def by_nearest(name: str, names: Iterable[str], near: str, none: str = "", *, cutoff: float = 0.7) -> str:
    """A sentence with the nearest of some names in place of {}; another one if none of them is near."""
    for nearest in get_close_matches(name, [*names], n=1, cutoff=cutoff):
        return near.replace("{}", nearest, 1)
    return none


def config_folder() -> Path:
    """``conf``: inside the package in a wheel, beside it in the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def is_override(word: str) -> bool:
    """Whether a word of a command line is one of Hydra's overrides, and no option or value of an option."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def in_our_words(typed: str, value: str, groups: Groups) -> str | None:
    """Return what to type here for a key or option of another program; ``None`` for names that are not known."""
    name = typed.lstrip("-").rstrip("+").replace("-", "_").replace(".init_args", "")
    ours = WORDS.get(f"{name}={value}".lower()) or WORDS.get(name)
    if ours is None:
        for theirs, section in TABLES["sections"].items():
            if name.startswith(f"{theirs}."):
                ours = section + name.removeprefix(theirs) + "={}"
    group = (ours or name).removesuffix("={}")
    if name in ("model", "data") and re.fullmatch(r"[^\W\d]\w*\.[^/]*", value):
        ours = f"{name}=own {name}._target_={{}}"
    elif group in groups:
        ours = _option(group, value, groups)
    if ours is None:
        return None
    return ours.replace("{}", value or "VALUE")


def _option(group: str, value: str, groups: Groups) -> str:
    """Return the option of a group, or timm's network or optimizer of that name."""
    if value.lower() in groups.get(group, ()):
        return f"{group}={value.lower()}"
    return OF_TIMM.get(group, f"{group}={{}}")


def check_words(words: Sequence[str], groups: Groups) -> None:
    """Refuse words that are neither options of this command line nor KEY=VALUE, with what to type instead of them."""
    theirs: list[str] = []
    ours: list[str] = []
    left = [*words]
    while left:
        word = left.pop(0)
        after = left[0] if left else ""
        name, equals, value = word.partition("=")
        takes_next = name.startswith("-") and after != "" and not equals and not re.match(r"-|.*=", after)
        if name in OPTIONS and not (name == "-c" and after.endswith("ml")):
            if takes_next and name in MAY_TAKE_A_VALUE:
                left.pop(0)
        elif not is_override(word):
            if takes_next:
                value = left.pop(0)
                word += f" {value}"
            theirs.append(word)
            ours.append(_translated(name, value, groups))
    if theirs:
        are = "are words" if len(theirs) > 1 else "is a word"
        line = " ".join(filter(None, ours))
        raise UserError(f"{' '.join(theirs)} {are} of another program; here is KEY=VALUE: write {line}.")


def _translated(name: str, value: str, groups: Groups) -> str:
    """Return what to type for an option or a word that stands alone."""
    ours: str | None = TABLES["commands"].get(name)
    if name.startswith("-"):
        ours = in_our_words(name, value or "true", groups)
    elif "/" in name:
        ours = f"data=image_folder data.root={name}"
    key = name.lstrip("-").replace(".init_args", "")
    if ours is None and value and key.partition(".")[0] in (*OWN_KEYS, *SECTIONS):
        ours = f"{key}={value}"
    if ours is None:
        raise UserError(
            f"{name} is neither KEY=VALUE nor an option: write KEY=VALUE, without blanks; --help lists the keys."
        )
    return ours
