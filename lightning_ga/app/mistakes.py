"""A mistake in one sentence: the package's own, else the message of the library that found it."""

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_ga.app.other_tools import OWN_KEYS, PLUGINS, Groups, in_our_words
from lightning_ga.errors import UserError

LONGEST = 600  # signs of a library's message: names of weights may be many
LIBRARIES = ("lightning", "pytorch_lightning", "torch", "lightning_ga")  # whose classes are not the user's own
Kind = TypeVar("Kind", bound=BaseException)


def explain(error: BaseException, overrides: Sequence[str] = (), groups: Groups | None = None) -> str:
    """One sentence for an error; it names the mistyped one of the ``overrides``, and options of ``groups``."""
    said = link_of(UserError, error) or link_of(OmegaConfBaseException, error) or error
    sentence = of_line(error, said, overrides, groups or {}) or of_run(error, said)
    notes: list[str] = []
    for link in chain(error):
        notes += getattr(link, "__notes__", [])
    return " ".join([sentence, *notes])


def of_run(error: BaseException, said: BaseException) -> str:
    """A sentence about what classes say: the package's own is printed whole, because its end is the remedy."""
    if isinstance(said, UserError):
        sentence = " ".join(str(said).split())
        if is_of_callback(said):  # whose arguments are keys of this section
            return f"accumulate: {sentence}"
        return sentence
    if isinstance(said, OmegaConfBaseException):
        sentence = ": ".join(filter(None, [said.full_key, one_line(said)]))
        if isinstance(said, MissingMandatoryValue):
            return f"{sentence}: give {said.full_key}=VALUE."
        return sentence
    if isinstance(error, InstantiationException):
        return f"{one_line(error)} (--traceback shows where)"
    if isinstance(error, ConfigCompositionException):
        return f"{one_line(error)} (an option is chosen by GROUP=OPTION, in a file by override /GROUP: OPTION)"
    if isinstance(error, HydraException):
        return one_line(error)
    cause = link_of(OSError, error) or error  # torch hides a full disk
    return f"{type(cause).__name__}: {one_line(cause)} (--traceback shows all)"


def is_of_callback(error: BaseException) -> bool:
    """Whether AutoAccumulate has raised an error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "lightning_ga.callback":
            return True
    return False


def of_line(error: BaseException, said: BaseException, overrides: Sequence[str], groups: Groups) -> str | None:
    """A sentence about the override that cannot be read, or that names no option or key; ``None`` for other errors."""
    if isinstance(error, OverrideParseException):
        remedy = "close quotes and brackets, quote a value with signs such as = or , twice, as in 'KEY=\"VALUE\"'"
        return f"{error.override} cannot be read: write KEY=VALUE without blanks, {remedy}."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # model=nope
        return of_missing_file(str(error.missing_cfg_file), error.options or (), groups)
    if isinstance(said, InterpolationKeyError) and said.full_key:
        remedy = f"choose an option that has it, or set {said.full_key}=VALUE."
        return f"{said.full_key}: {one_line(said)}: {remedy}"
    if not isinstance(error, ConfigCompositionException) or not isinstance(said, OmegaConfBaseException):
        return None
    missing = str(said.full_key)
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        is_of_missing = f"{missing}.".startswith(f"{key}.") or key.startswith(f"{missing}.")
        if is_of_missing and (key not in groups or key == missing):  # else it chooses an option
            return of_key(key, value, missing, said, groups)
    return None


def of_missing_file(path: str, options: Sequence[str], groups: Groups) -> str:
    """A file of the configuration that does not exist: an option of a group, or all of it."""
    group, _, option = path.partition("/")
    if group not in groups:  # hydra/sweeper/optuna
        group, _, option = path.rpartition("/")
    if not group:
        return f"{option}.yaml is in no folder of configurations: leave --config-name out, or add --config-dir FOLDER."
    return of_option(group, option, options or groups.get(group, ()), groups)


def of_option(group: str, option: str, options: Sequence[str], groups: Groups) -> str:
    """An option that does not exist: those that do, or the plugin of Hydra that has it."""
    plugin = PLUGINS.get(f"{group}/{option}")
    if plugin is not None:
        return f"{group}={option} belongs to a plugin of Hydra: {plugin}."
    listed = ", ".join(name for name in options if not name.startswith("_"))
    sentence = f"{group}={option} does not exist. There are: {listed}."
    ours = in_our_words(group, option, groups) or ""
    if ours.startswith(f"{group}=timm"):
        return f"{sentence} If it is one of timm, write {ours}."
    return sentence


def of_key(key: str, value: str, missing: str, said: Any, groups: Groups) -> str:
    """A key that does not exist: what other programs mean by it, or the nearest name, or how it is added."""
    section: Any = said.parent_node
    known = [*section] if OmegaConf.is_dict(section) else []
    if missing.startswith(f"{key}."):  # in a mapping, which Hydra merges into the one that is there
        listed = ", ".join(map(str, known)) or "no keys"
        remedy = f"to replace it, write '~{key}' '+{key}={value}'"
        return f"{key} has no {missing.removeprefix(f'{key}.')}, but {listed}: {remedy}."
    parent = missing.rpartition(".")[0]
    if key in OWN_KEYS or key in groups:
        return f"Your train.yaml does not have {key}, which is read here: write +{key}={value}."
    target = str(section.get("_target_", "lightning_ga")) if known else "lightning_ga"
    is_own = target.partition(".")[0] not in LIBRARIES
    is_inner = "." in parent and bool(known)  # of an optimizer of one's own, or of a callback
    if not is_own and not is_inner:
        ours = in_our_words(key, value, groups)
        if ours is not None:
            return f"There is no key {key}: write {ours}."
    hint = ""
    for nearest in nearest_keys(key, missing, section if known else {}):
        hint = f": did you mean {nearest}?"
    return f"There is no key {key}{hint or '.'} To add it, write +{key}={value}."


def nearest_keys(key: str, missing: str, section: Mapping[Any, Any]) -> Iterator[str]:
    """The nearest key, if one is near: of the section, or of all sections if ``missing`` is at the top."""
    parent, _, name = missing.rpartition(".")
    names = {}
    if parent:
        names = {str(known): f"{parent}.{known}" for known in section}
    else:
        name = key
        for group, content in section.items():
            for known in content if OmegaConf.is_dict(content) and group != "hydra" else ():
                names[f"{group}.{known}"] = f"{group}.{known}"
            names[str(group)] = str(group)
    for nearest in get_close_matches(name, names, n=1, cutoff=0.7):
        yield names[nearest]


def link_of(kind: type[Kind], error: BaseException) -> Kind | None:
    """The first of an error and its causes that is of this kind."""
    for link in chain(error):
        if isinstance(link, kind):
            return link
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, from the outside in, but for those that ``raise … from None`` leaves out."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        following = error.__cause__
        if following is None and not error.__suppress_context__:
            following = error.__context__
        error = following


def one_line(error: BaseException) -> str:
    """The first paragraph of a message, on one line; the line of the program if there is no message."""
    text, _, trace = inspect.cleandoc(str(error)).partition("\nOriginal Traceback")  # of a data worker
    paragraph = " ".join([re.split(r"\n\n|\n *full_key:", text)[0], *trace.splitlines()[-1:]])
    if paragraph.strip():
        return shorten(paragraph, LONGEST, placeholder=" …")
    for line in traceback.extract_tb(error.__traceback__)[-1:]:
        return f"{line.line} ({Path(line.filename).name}, line {line.lineno})"
    return type(error).__name__
