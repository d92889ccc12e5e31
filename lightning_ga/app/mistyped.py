"""What a user has mistyped: an option or a key that does not exist, and what to type.

Tested in tests/app/test_mistakes.py.
"""

from collections.abc import Sequence
from typing import Any

from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.other_tools import LIBRARIES, PLUGINS, WORDS, Groups, by_nearest, in_our_words


def of_line(error: BaseException, said: BaseException, overrides: Sequence[str], groups: Groups) -> str | None:
    """A sentence about the override that names no option or key; ``None`` for other errors."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # model=nope
        return of_missing_file(str(error.missing_cfg_file), error.options or (), groups)
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


def of_key(key: str, value: str, missing: str, said: Any, groups: Groups) -> str:
    """A key that does not exist: what other programs mean by it, or the nearest name, and how it is added."""
    section = said.parent_node if OmegaConf.is_dict(said.parent_node) else {}
    if missing.startswith(f"{key}."):  # in a mapping, which Hydra merges into the one that is there
        listed = ", ".join(map(str, section)) or "no keys"
        remedy = f"to replace it, write '~{key}' '+{key}={value}'"
        return f"{key} has no {missing.removeprefix(f'{key}.')}, but {listed}: {remedy}."
    parent, _, name = missing.rpartition(".")
    is_own = str(section.get("_target_", "lightning_ga")).partition(".")[0] not in LIBRARIES
    is_inner = "." in parent and bool(section)  # of an optimizer of one's own, or of a callback
    if not is_own and (not is_inner or key in WORDS):
        ours = in_our_words(key, value, groups)
        if ours is not None:
            return f"There is no key {key}: write {ours}."
    near = f": did you mean {missing.removesuffix(name)}{{}}{key.removeprefix(missing)}?"
    return f"There is no key {key}{by_nearest(name, map(str, section), near, '.')} To add it, write +{key}={value}."
