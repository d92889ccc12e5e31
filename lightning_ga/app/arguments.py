"""What a configuration gives a class, compared with the signature of the class: keys by their names, as typed."""

import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from pkgutil import resolve_name
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.hydra_config import HydraConfig

from lightning_ga.app.mistakes import one_line
from lightning_ga.errors import UserError

LIBRARIES = ("lightning", "pytorch_lightning", "torch", "lightning_ga")  # their annotations are true
UNIONS = (Union, types.UnionType)
LISTS = (list, tuple, Sequence, Iterable, Collection)
KINDS: Mapping[Any, tuple[set[Any], str]] = {  # of annotations: types of values that fit, and words
    bool: ({bool, int}, "true or false"),
    int: ({int}, "a whole number"),
    float: ({float, int}, "a number"),
    str: ({str}, "a text"),
    type(None): ({type(None)}, "null"),
    list: ({list}, "a list ([VALUE, …], each {})"),
    dict: ({dict}, "a mapping ({KEY: VALUE})"),
    Callable: (set(), "a class ({_target_: NAME})"),
}


def check_arguments(key: str, raw: Any, content: Any, *, failed: bool = False) -> None:
    """Refuse arguments that no class can be called with, and values that contradict annotations.

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
            annotation, default = known[name]
            is_true = failed or (is_library and value is not None) or is_typed(keys[name])
            if is_true and not fits(value, annotation) and type(value) is not type(default):
                takes = f"{target.__name__} takes {described(annotation)} as {name}"
                raise UserError(f"{keys[name]}={written(value)} does not fit: {takes}.")
        elif is_closed or (failed and known):
            hint = ": it"
            for nearest in get_close_matches(name, known, n=1, cutoff=0.6):
                hint = f"; did you mean {nearest}? It"
            listed = [one for one, (annotation, _) in known.items() if annotation is not type(None)]  # some are removed
            text = f"{key}.{name}={written(value)}: {target.__name__} got an unexpected keyword argument {name!r}"
            raise UserError(f"{text}{hint} takes {', '.join(listed)}.")
    if failed and not content.get("_partial_"):
        for name, (_, default) in known.items():
            if default is Parameter.empty and name not in content:
                added = "_partial_=true, as the module gives it" if name in ("params", "optimizer") else f"{name}=VALUE"
                raise UserError(f"{key}.{name} is missing, which {target.__name__} needs: add +{key}.{added}.")


def found_at(key: str, path: str) -> Any:
    """The class or function of a full name."""
    try:
        return resolve_name(path)
    except Exception as error:  # modules raise anything
        home, _, name = path.rpartition(".")
        remedy = "give the full name of a class that Python finds."
        for nearest in get_close_matches(name, dir(sys.modules.get(home, object)), n=1, cutoff=0.6):
            remedy = f"did you mean {home}.{nearest}?"
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


def arguments_of(target: Any) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """The annotation and default of each argument, and whether there are no others.

    ``**arguments`` of a class are looked for in its bases, which usually get them.
    """
    known: dict[str, tuple[Any, Any]] = {}
    constructors = [target]
    if inspect.isclass(target):
        constructors = [vars(one)["__init__"] for one in inspect.getmro(target) if "__init__" in vars(one)]
    for place, function in enumerate(constructors):
        try:
            parameters = [*inspect.signature(function).parameters.values()]
            hints = get_type_hints(function)
        except Exception:  # it is not in Python, or an annotation names what is not there
            return known, False
        for one in parameters[inspect.isclass(target) :]:
            is_named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
            if is_named and (not place or one.default is not one.empty):  # the class itself gives its base the others
                known.setdefault(one.name, (hints.get(one.name, Any), one.default))
        if Parameter.VAR_KEYWORD not in [one.kind for one in parameters]:
            return known, not place
    return known, False


def kind_of(annotation: Any) -> Any:
    """The entry of ``KINDS`` that an annotation is; ``Callable`` if it has to be built, ``None`` if not known."""
    origin = get_origin(annotation) or annotation
    if origin in KINDS:
        return origin
    if origin in LISTS:
        return list
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return dict
    is_built = inspect.isclass(origin) and issubclass(origin, torch.Tensor | torch.nn.Module)
    return Callable if is_built else None


def fits(value: Any, annotation: Any) -> bool:
    """Whether an annotation allows a plain value; what is to be built, and annotations by classes, allow anything."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if value == "???" or (isinstance(value, Mapping) and "_target_" in value):
        return True
    if origin in UNIONS:
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    kind = kind_of(annotation)
    if kind is None:
        return True
    if kind is list and isinstance(value, list) and inner and origin is not tuple:
        return all(fits(one, inner[0]) for one in value)
    return type(value) in KINDS[kind][0]


def described(annotation: Any) -> str:
    """An annotation in words."""
    inner = get_args(annotation)
    if get_origin(annotation) in UNIONS:
        parts = [described(one) for one in inner if one is not torch.Tensor and not (one is int and float in inner)]
        return " or ".join(dict.fromkeys(parts))
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, inner))
    kind = kind_of(annotation) or Callable
    each = described(inner[0]) if kind is list and inner else "a value"
    return KINDS[kind][1].replace("{}", each)


def written(value: Any) -> str:
    """A value as it is typed."""
    text = str(value).replace("'", "")
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)
