"""What a user has mistyped: a value that cannot be read, an option or a key that does not exist, and what to type.

Tested in tests/app/test_mistakes.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from lightning_ga.app.other_tools import (
    LIBRARIES,
    OWN_KEYS,
    PLUGINS,
    WORDS,
    Groups,
    by_nearest,
    config_folder,
    in_our_words,
)


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
    if ".." in key or key.endswith(".") or value.startswith("=") or re.fullmatch(r"[\w.-]+,", value):
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
    content: Any = OmegaConf.load(config_folder() / group / f"{option}.yaml")
    bases = [str(base) for base in content.get("defaults", ()) if str(base).isidentifier()]
    return name in content or any(has_key(group, base, name) for base in bases)


def of_key(key: str, value: str, missing: str, said: Any, groups: Groups) -> str:
    """A key that does not exist: what other programs mean by it, or the nearest name, or how it is added."""
    section = said.parent_node if OmegaConf.is_dict(said.parent_node) else {}
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
    if parent:
        hint = by_nearest(name, map(str, section), f": did you mean {parent}.{{}}?")
    else:
        hint = by_nearest(key, keys_of(section), ": did you mean {}?")
    remedy = ""
    if "_target_" in section:
        remedy = f" If {target.rpartition('.')[2]} takes {name}, write +{key}={value}."
    elif not hint:
        remedy = f" To add it, write +{key}={value}."
    return f"There is no key {key}{hint or '.'}{remedy}"


def keys_of(cfg: Mapping[Any, Any]) -> Iterator[str]:
    """The keys at the top of a configuration and those of its sections, but for Hydra's."""
    for section, content in cfg.items():
        yield str(section)
        if OmegaConf.is_dict(content) and section != "hydra":
            yield from (f"{section}.{key}" for key in content)
