"""What a user has mistyped: a value that cannot be read, an option or a key that does not exist, and what to type.

Tested in tests/app/test_mistakes.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from lightning_ga.app.other_tools import LIBRARIES, OWN_KEYS, PLUGINS, WORDS, Groups, config_folder, in_our_words


def of_line(error: BaseException, said: BaseException, overrides: Sequence[str], groups: Groups) -> str | None:
    """A sentence about the override that cannot be read, or that names no option or key; ``None`` for other errors."""
    if isinstance(error, OverrideParseException):
        return of_value(str(error.override), str(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # model=nope
        return of_missing_file(str(error.missing_cfg_file), error.options or (), groups)
    if isinstance(said, InterpolationKeyError) and said.full_key:
        return of_reference(str(said.full_key), str(said), groups)
    if not isinstance(error, HydraException):
        return None
    ambiguous = re.match(r"Ambiguous value for argument '(([^=]+)=(.*))'\n", str(error))
    if ambiguous:
        word, key, values = ambiguous.groups()
        return f"{word} has several values: add -m to run each of them, or write '{key}=[{values}]' for a list."
    repeated = re.match(r"Multiple values for (\w+)\.|(\w+) appears more than once", str(error))  # +experiment=mine
    if repeated:
        group = repeated[1] or repeated[2]
        remedy = f"write {group}=OPTION, without a +, or in a file override /{group}."
        return f"{group} is among the defaults already: {remedy}"
    if isinstance(error, ConfigCompositionException) and isinstance(said, OmegaConfBaseException):
        return of_composed(said, overrides, groups)
    return None


def of_composed(said: OmegaConfBaseException, overrides: Sequence[str], groups: Groups) -> str | None:
    """A sentence about the override that sets a key which does not exist."""
    missing = str(said.full_key)
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        is_of_missing = f"{missing}.".startswith(f"{key}.") or key.startswith(f"{missing}.")
        if is_of_missing and (key not in groups or key == missing):  # else it chooses an option
            return of_key(key, value, missing, said, groups)
    return None


def of_value(word: str, message: str) -> str:
    """A value that Hydra cannot read: it is taken for a function, a bracket or quote is open, or it needs quotes."""
    key, _, value = word.partition("=")
    is_doubled = ".." in key or key.endswith(".") or value.startswith("=")
    if is_doubled or re.fullmatch(r"[\w.-]+,", value):
        return f"{word} cannot be read: write {re.sub('[.]+', '.', key).strip('.')}={value.strip('=,')}."
    function = re.search(r"Unknown function '(\w+)'", message)
    if function:
        return f"{word} cannot be read: a function is written as '{key}={{_target_:{function[1]},ARGUMENT:VALUE}}'."
    for begin, end in ("[]", "{}", "()"):
        if value.count(begin) > value.count(end):
            return f"{word} lacks a {end}: write '{word}{end}', in quotes because of the shell."
        if value.count(begin) < value.count(end):
            return f"{word} lacks a {begin}: write '{key}={begin}{value}', in quotes because of the shell."
    if value.count("'") % 2 or value.count('"') % 2:
        return f"{word} has a quote that is not closed: close it, or leave it out."
    return f"{word} cannot be read: a value with signs such as = or , is quoted twice: '{key}=\"{value}\"'"


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
    if "/" in option and group == "data":
        return f"{sentence} For pictures, write data=image_folder data.root={option}."
    return sentence


def of_reference(key: str, message: str, groups: Groups) -> str:
    """A value that is taken from a key which does not exist, such as one of another data set."""
    found = re.search(r"Interpolation key '([^']+)' not found", message)
    needed = found[1] if found else "another key"
    section, _, name = needed.partition(".")
    having = [option for option in groups.get(section, ()) if has_key(section, option, name)]
    remedy = f"add +{needed}=VALUE"
    if having:
        remedy = f"add {section}={' or '.join(having)}"
    return f"{key} is taken from {needed}, which is not there: {remedy}, or set {key}=VALUE."


def has_key(group: str, option: str, name: str) -> bool:
    """Whether the file of an option has a key at its top, or one of those that it is made from."""
    text = (config_folder() / group / f"{option}.yaml").read_text("utf-8")
    for base in re.findall(r"^  - (\w+)$", text, re.MULTILINE):
        if has_key(group, base, name):
            return True
    return re.search(rf"^{name}:", text, re.MULTILINE) is not None


def of_key(key: str, value: str, missing: str, said: Any, groups: Groups) -> str:
    """A key that does not exist: what other programs mean by it, or the nearest name, or how it is added."""
    section: Any = said.parent_node
    if not OmegaConf.is_dict(section):
        section = {}
    if missing.startswith(f"{key}."):  # in a mapping, which Hydra merges into the one that is there
        listed = ", ".join(map(str, section)) or "no keys"
        remedy = f"to replace it, write '~{key}' '+{key}={value}'"
        return f"{key} has no {missing.removeprefix(f'{key}.')}, but {listed}: {remedy}."
    parent, _, name = missing.rpartition(".")
    if key in OWN_KEYS or key in groups:
        return f"Your train.yaml does not have {key}, which is read here: write +{key}={value}."
    target = str(section.get("_target_", "lightning_ga"))
    is_own = target.partition(".")[0] not in LIBRARIES
    is_inner = "." in parent and bool(section)  # of an optimizer of one's own, or of a callback
    if not is_own and (not is_inner or key in WORDS):
        ours = in_our_words(key, value, groups)
        if ours is not None:
            return f"There is no key {key}: write {ours}."
    sentence = f"There is no key {key}."
    for nearest in nearest_keys(key, missing, section):
        sentence = f"There is no key {key}: did you mean {nearest}?"
        if "_target_" not in section:
            return sentence
    if "_target_" in section:
        return f"{sentence} If {target.rpartition('.')[2]} takes {name}, write +{key}={value}."
    return f"{sentence} To add it, write +{key}={value}."


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
