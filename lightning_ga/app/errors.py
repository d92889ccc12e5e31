"""A mistake in one sentence: the package's own, else the message of the library that found it."""

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.errors import UserError

LONGEST = 600  # signs of a message: names of weights may be many


def explain(
    error: BaseException, overrides: Sequence[str] = (), groups: Mapping[str, Sequence[str]] | None = None
) -> str:
    """One sentence for an error; it names the mistyped one of the ``overrides``, and options of ``groups``."""
    links = [*chain(error)]
    own = (link for kind in (UserError, OmegaConfBaseException) for link in links if isinstance(link, kind))
    said = next(own, error)
    key = str(getattr(said, "full_key", None) or "")
    typed = of_line(error, said, overrides, groups or {})
    if typed is not None:
        text = typed
    elif isinstance(error, InstantiationException) and not isinstance(said, UserError | OmegaConfBaseException):
        target = re.search(r"'([^']+)'", str(error))
        cause = next((link for link in links if not isinstance(link, HydraException)), error)
        text = f"{target[1] if target else 'A class'} could not be built: {one_line(cause)} (--traceback shows where)"
    elif isinstance(said, UserError | HydraException | OmegaConfBaseException):
        text = f"{key}: {one_line(said)}" if key else one_line(said)
    else:
        cause = next((link for link in links if isinstance(link, OSError)), error)  # torch hides a full disk
        text = f"{type(cause).__name__}: {one_line(cause)} (--traceback shows all)"
    for group in ("model", "data"):
        named = [word.partition("=")[2] for word in overrides if word.startswith(f"{group}._target_=")]
        is_met = key.startswith(f"{group}.") or ("unexpected keyword" in text and text.startswith(tuple(named)))
        if named and is_met and f"{group}=own" not in overrides:
            text += f" {group}._target_ alone keeps the keys of the {group} that is chosen: add {group}=own."
    return " ".join([text, *(note for link in links for note in getattr(link, "__notes__", ()))])


def of_line(
    error: BaseException, said: BaseException, overrides: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> str | None:
    """A sentence about the override that cannot be read, or that names no option or key."""
    text = str(error)
    if isinstance(error, OverrideParseException) and re.match(r"\S+=", str(error.override)):  # ckpt_path=epoch=1.ckpt
        key, _, value = str(error.override).partition("=")
        quoted = f"'{key}=\"{value}\"'"
        return f"{error.override} cannot be read: a value with signs such as = or , is quoted twice: {quoted}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # model=nope
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = ", ".join(error.options or groups.get(group, ())) or "none"
        return f"{f'{group}={option}' if group else option} does not exist. There are: {options}."
    if "Config group override must be" in text:  # precision=16
        for word in overrides:
            group, _, value = word.lstrip("+").partition("=")
            option = OmegaConf.from_dotlist([f"value={value}"])["value"]
            if group in groups and not isinstance(option, str | ListConfig):
                return f"{word} names no option. There are: {', '.join(groups[group])}."
    repeated = re.match(r"Multiple values for (\w+)\.", text)  # +experiment=mine
    if repeated:
        return f"{repeated[1]} is among the defaults already: write {repeated[1]}=OPTION, without a +."
    unknown = re.match(r"Could not override '([^']+)'", text)
    return of_key(unknown[1], getattr(said, "parent_node", None), [*groups]) if unknown else None


def of_key(key: str, section: Any, groups: Sequence[str]) -> str:
    """A key that does not exist, with the nearest name, if one is near."""
    parent, _, name = key.rpartition(".")
    first, _, rest = key.partition(".")
    if first in ("callbacks", "logger") and "." in rest:
        part = rest.partition(".")[0]
        return f"There is no {first}.{part}: choose it by {first}=[default,{part}], or give {first}.{part}._target_."
    names = {str(known): f"{parent}.{known}".lstrip(".") for known in section or groups}
    if section is not None and not parent:  # lr, batch_size, max_epochs: the last part of a key in a section
        inner = ((group, known) for group in groups if hasattr(section.get(group), "keys") for known in section[group])
        names = {str(known): f"{group}.{known}" for group, known in inner} | names
    nearest = get_close_matches(name, names, n=1, cutoff=0.7)
    hint = f"; did you mean {names[nearest[0]]}?" if nearest else "."
    return f"There is no key {key}{hint} +{key}=VALUE adds one of your own."


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, from the outside in, but for those that ``raise … from None`` leaves out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def one_line(error: BaseException) -> str:
    """The first paragraph of a message, on one line; the line of the program if there is no message."""
    text, _, trace = inspect.cleandoc(str(error)).partition("\nOriginal Traceback")  # of a data worker
    paragraph = " ".join([re.split(r"\n\n|\n *full_key:", text)[0], *trace.splitlines()[-1:]])
    lines = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f"{line.line} ({Path(line.filename).name}, line {line.lineno})" for line in lines)
    return shorten(paragraph, LONGEST, placeholder=" …") or where or type(error).__name__
