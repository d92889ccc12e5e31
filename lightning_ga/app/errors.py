"""A user's mistake in one sentence: what was wrong, and the nearest right thing.

Hydra tells a wrong option, an unknown key and a failed constructor in traces of several errors.
:func:`explain` turns such a chain into one line; everything that it does not know is a bug of the
package and keeps its traceback.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import get_object
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lightning_ga.app.allowlist import check_target
from lightning_ga.errors import UserError

EXPECTED = (UserError, HydraException, OmegaConfBaseException, MisconfigurationException)


def explain(error: BaseException, keys: Sequence[str] = ()) -> str:
    """One sentence for an error of one of the ``EXPECTED`` types.

    Args:
        error: What was raised.
        keys: The groups and keys that exist at the top of the configuration.
    """
    for cause in chain(error):
        if isinstance(cause, UserError):
            return one_line(cause)
    if isinstance(error, MissingConfigException) and error.options:
        return explain_option(error)
    unknown = re.match(r"Could not override '([^']+)'", str(error))
    if unknown:
        siblings = sibling_keys(error)
        return explain_key(unknown[1], siblings or top_of(unknown[1], keys), complete=is_complete(error))
    if isinstance(error, InstantiationException):
        return explain_constructor(error)
    return one_line(error)


def top_of(key: str, keys: Sequence[str]) -> Sequence[str]:
    """The keys of the whole configuration, for a key that is looked up there."""
    return () if "." in key else keys


def explain_option(error: MissingConfigException) -> str:
    """``model=nope``: the options that exist, the nearest first."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    options = ", ".join(error.options or ())
    return f"{group}={option} does not exist{did_you_mean(option, error.options or ())} The options: {options}."


def explain_key(key: str, siblings: Sequence[str], *, complete: bool = False) -> str:
    """``trainer.max_epoch=3``: the nearest key beside it; where these are all there are, a list of them."""
    parent, _, name = key.rpartition(".")
    nearest = [f"{parent}.{match}" if parent else match for match in near(name, siblings)]
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
    if complete:
        known = ", ".join(sorted(name for name in siblings if not name.startswith("_")))
        return f"There is no key {key}{hint} The keys of {parent}: {known}."
    return f"There is no key {key}{hint} To add a key of your own, write +{key}=VALUE."


def explain_constructor(error: InstantiationException) -> str:
    """A constructor that failed: whose, why, and the nearest argument if one is unknown."""
    target = re.search(r"(?:call to target|locating target) '([^']+)'", str(error))
    key = re.search(r"full_key: (\S+)", str(error))
    cause = next((cause for cause in chain(error) if not isinstance(cause, HydraException)), error)
    name = f"{key[1]} ({target[1]})" if key and target else target[1] if target else "The configuration"
    unknown = re.search(r"unexpected keyword argument '([^']+)'", str(cause))
    known = arguments_of(target[1]) if unknown and target else ()
    if unknown and known:
        choice = did_you_mean(unknown[1], known)
        return f"{name} could not be built: {one_line(cause)}{choice} Its arguments: {', '.join(known)}."
    return f"{name} could not be built: {one_line(cause)} (--traceback shows where)"


def arguments_of(target: str) -> list[str]:
    """The arguments by name that a target takes; none if it takes any, or must not be imported."""
    try:
        check_target(target)
        parameters = inspect.signature(get_object(target)).parameters.values()
    except (UserError, HydraException, ImportError, TypeError, ValueError):
        return []
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return []
    return [parameter.name for parameter in parameters if parameter.name != "self"]


def is_complete(error: BaseException) -> bool:
    """Whether a section has every argument of what it builds, so that none can be added."""
    section = parent_section(error)
    if section is None or "_target_" not in section:
        return False
    known = arguments_of(str(section._get_node("_target_")))
    return bool(known) and set(known) <= set(section)


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The end of a sentence: a full stop, or a suggestion."""
    nearest = near(name, names)
    return f"; did you mean {' or '.join(nearest)}?" if nearest else "."


def near(name: str, names: Sequence[str]) -> list[str]:
    """At most two names that look like a name."""
    return get_close_matches(name, [str(known) for known in names], n=2, cutoff=0.6)


def sibling_keys(error: BaseException) -> list[str]:
    """The keys beside the one that an OmegaConf error could not find."""
    return [str(key) for key in parent_section(error) or ()]


def parent_section(error: BaseException) -> Any:
    """The section in which an OmegaConf error could not find a key."""
    for cause in chain(error):
        parent: Any = getattr(cause, "parent_node", None)
        if parent is not None and hasattr(parent, "keys"):
            return parent
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, from the outside in."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def one_line(error: BaseException) -> str:
    """The first paragraph of a message, on one line."""
    paragraph = inspect.cleandoc(str(error)).split("\n\n")[0]
    return " ".join(paragraph.split()) or type(error).__name__
