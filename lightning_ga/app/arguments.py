"""What a configuration gives a class, compared with the signature of the class: keys by their names, as typed."""

import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import Parameter
from pkgutil import resolve_name
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.hydra_config import HydraConfig

from lightning_ga.app.mistakes import one_line
from lightning_ga.app.other_tools import LIBRARIES, by_nearest
from lightning_ga.errors import UserError

UNIONS = (Union, types.UnionType)
LISTS = (list, tuple, Sequence, Iterable, Collection)
KINDS: Mapping[Any, str] = {  # of annotations that a plain value can be compared with, in words
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
    list: "a list ([VALUE, …], each {})",
    dict: "a mapping ({{KEY: VALUE}})",
    Callable: "a class ({{_target_: NAME}})",
}
NOT_ZERO = {  # arguments that are divided by, and what to type in place of zero
    "check_val_every_n_epoch": "trainer.limit_val_batches=0 leaves validation out",
    "val_check_interval": "trainer.limit_val_batches=0 leaves validation out",
    "rows": "leave it out for the default",
    "step_size": "lr_scheduler=none keeps the learning rate as it is",
}
Known = Mapping[str, Parameter]


def check_arguments(key: str, raw: Any, content: Any, *, failed: bool = False) -> None:
    """Refuse arguments that no class can be called with, values that contradict annotations, and zeros to divide by.

    Those of libraries always count, those of other classes for what is typed.

    Args:
        key: The key of the node.
        raw: The node with its interpolations as they are written.
        content: The node as plain values.
        failed: Whether the class could not be built: what it lacks, and values that are not typed, are then named too.

    Raises:
        UserError: With the key, its value, and what the class takes.
    """
    if not isinstance(raw, type(content)):  # an interpolation
        raw = content
    if isinstance(content, list):
        for number, value in enumerate(content):
            check_arguments(f"{key}.{number}", raw[number], value, failed=failed)
    if not isinstance(content, dict):
        return
    keys = {}
    for name, value in content.items():
        keys[name] = referred(raw[name]) or f"{key}.{name}"
        check_arguments(keys[name], raw[name], value, failed=failed)
    if content.get("_target_", "???") != "???":
        check_call(key, keys, content, failed=failed)


def check_call(key: str, keys: Mapping[Any, str], content: Mapping[Any, Any], *, failed: bool) -> None:
    """Compare the values of one node, whose own keys are given, with what its class takes."""
    target = found_at(f"{key}._target_", str(content["_target_"]))
    known, is_closed = arguments_of(target)
    is_library = target.__module__.partition(".")[0] in LIBRARIES
    for name, value in content.items():
        if name.startswith("_") and name.endswith("_"):  # for Hydra
            continue
        if name in known:
            parameter = known[name]
            is_like_default = type(value) is type(parameter.default)
            is_to_be_compared = failed or (is_library and value is not None) or is_typed(keys[name])
            if is_to_be_compared and not is_like_default and not fits(value, parameter.annotation):
                takes = f"{target.__name__} takes {described(parameter.annotation)} as {name}"
                raise UserError(f"{keys[name]}={as_typed(value)} does not fit: {takes}.")
            if is_library and name in NOT_ZERO and as_typed(value) == "0":
                raise UserError(f"{keys[name]}=0 must be above 0; {NOT_ZERO[name]}.")
        elif is_closed or (failed and known):
            refuse_unknown(f"{key}.{name}={as_typed(value)}", target.__name__, name, known)
    if failed and not content.get("_partial_"):
        require_all(key, target.__name__, known, content)


def refuse_unknown(word: str, target: str, name: str, known: Known) -> NoReturn:
    """Refuse an argument that a class does not have, with the nearest one and all others."""
    hint = by_nearest(name, known, "; did you mean {}? It", ": it", cutoff=0.6)
    listed = [one for one, parameter in known.items() if parameter.annotation is not type(None)]  # some are removed
    raise UserError(f"{word}: {target} got an unexpected keyword argument {name!r}{hint} takes {', '.join(listed)}.")


def require_all(key: str, target: str, known: Known, content: Mapping[Any, Any]) -> None:
    """Refuse a node without an argument that its class needs."""
    for name, parameter in known.items():
        if parameter.default is not Parameter.empty or name in content:
            continue
        added = f"{name}=VALUE"
        if name in ("params", "optimizer"):
            added = "_partial_=true, as the module gives it"
        raise UserError(f"{key}.{name} is missing, which {target} needs: add +{key}.{added}.")


def found_at(key: str, path: str) -> Any:
    """The class or function of a full name."""
    try:
        return resolve_name(path)
    except Exception as error:  # modules raise anything
        home, _, name = path.rpartition(".")
        nearest = by_nearest(name, dir(sys.modules.get(home, object)), f"did you mean {home}.{{}}?", cutoff=0.6)
        remedy = nearest or "give the full name of a class that Python finds."
        raise UserError(f"{key}={path} cannot be imported ({one_line(error)}): {remedy}") from error


def referred(raw: Any) -> str | None:
    """The key that an interpolation takes its value from: ``optimizer`` of ``${optimizer}``."""
    found = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)\}", str(raw))
    return found[1] if found else None


def is_typed(key: str) -> bool:
    """Whether a key, or a mapping around it, is set on the command line."""
    if not HydraConfig.initialized():
        return False
    own = HydraConfig.get()
    for word in own.overrides.task:
        typed = word.lstrip("+").partition("=")[0]
        if typed not in own.runtime.choices and f"{key}.".startswith(f"{typed}."):
            return True
    return False


def arguments_of(target: Any) -> tuple[Known, bool]:
    """The arguments of a class or function with their annotations as types, and whether there are no others.

    ``**arguments`` of a class are looked for in its bases, which usually get them.
    """
    known: dict[str, Parameter] = {}
    constructors = [target]
    if inspect.isclass(target):
        constructors = [vars(base)["__init__"] for base in inspect.getmro(target) if "__init__" in vars(base)]
    for place, function in enumerate(constructors):
        try:
            parameters = [*inspect.signature(function).parameters.values()]
            hints = get_type_hints(function)
        except Exception:  # it is not in Python, or an annotation names what is not there
            return known, False
        has_others = False
        for one in parameters[inspect.isclass(target) :]:
            if one.kind is one.VAR_KEYWORD:
                has_others = True
            elif one.kind is not one.VAR_POSITIONAL and (not place or one.default is not one.empty):
                known.setdefault(one.name, one.replace(annotation=hints.get(one.name, Any)))  # bases get the others
        if not has_others:
            return known, not place
    return known, False


def kind_of(annotation: Any) -> Any:
    """The entry of ``KINDS`` that an annotation is; ``Callable`` if it has to be built, ``None`` if not known."""
    origin = get_origin(annotation) or annotation
    if origin in KINDS:
        return origin
    if origin in LISTS:
        return list
    if not inspect.isclass(origin):
        return None
    if issubclass(origin, Mapping):
        return dict
    return Callable if issubclass(origin, torch.Tensor | torch.nn.Module) else None


def fits(value: Any, annotation: Any) -> bool:
    """Whether an annotation allows a plain value; what is to be built, and annotations by classes, allow anything."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if value == "???" or (isinstance(value, Mapping) and "_target_" in value):
        return True
    if origin in UNIONS:
        return any(fits(value, member) for member in inner)
    if origin is Literal:
        return value in inner
    kind = kind_of(annotation)
    if kind is list and isinstance(value, list) and inner and origin is not tuple:
        return all(fits(each, inner[0]) for each in value)
    is_whole_number = type(value) is int and kind in (bool, float)
    return kind is None or type(value) is kind or is_whole_number


def described(annotation: Any) -> str:
    """An annotation in words."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, inner))
    if get_origin(annotation) not in UNIONS:
        kind = kind_of(annotation) or Callable
        each = described(inner[0]) if kind is list and inner else "a value"
        return KINDS[kind].format(each)
    texts = dict.fromkeys(described(member) for member in inner if member is not torch.Tensor)
    if KINDS[float] in texts:
        texts.pop(KINDS[int], None)
    return " or ".join(texts)


def as_typed(value: Any) -> str:
    """A value as the command line takes it."""
    text = str(value).replace("'", "")
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)
