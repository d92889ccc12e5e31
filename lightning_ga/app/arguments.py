"""What a configuration gives a class, compared with the signature of the class: keys by their names, as typed."""

import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from hydra.core.hydra_config import HydraConfig

from lightning_ga.app.errors import one_line
from lightning_ga.errors import UserError

LIBRARIES = ("lightning", "pytorch_lightning", "torch", "lightning_ga")  # their annotations are true
PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}


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
    raw = raw if isinstance(raw, type(content)) else content  # behind an interpolation
    if isinstance(content, list):
        for number, (inner, value) in enumerate(zip(raw, content, strict=True)):
            check_arguments(f"{key}.{number}", inner, value, failed=failed)
    if not isinstance(content, dict):
        return
    keys = {str(name): referred(raw[name]) or f"{key}.{name}" for name in content}
    for name, value in content.items():
        check_arguments(keys[str(name)], raw[name], value, failed=failed)
    if "_target_" not in content or content["_target_"] == "???":
        return
    target = found_at(f"{key}._target_", str(content["_target_"]))
    known, closed = arguments_of(target)
    given = [name for name in keys if not (name.startswith("_") and name.endswith("_"))]
    for name in given:
        value, title = content[name], f"{keys[name]}={written(content[name])}"
        if name not in known and (closed or (failed and known)):
            nearest = get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {nearest[0]}? It" if nearest else ": it"
            title = f"{key}.{name}={written(content[name])}"
            text = f"{title}: {target.__name__} got an unexpected keyword argument {name!r}"
            listed = [one for one, (annotation, _) in known.items() if annotation is not type(None)]  # some are removed
            raise UserError(f"{text}{hint} takes {', '.join(listed)}.")
        hint, default = known.get(name, (Any, None))
        is_library = value is not None and target.__module__.partition(".")[0] in LIBRARIES
        if (failed or is_library or is_typed(keys[name])) and not (fits(value, hint) or type(value) is type(default)):
            raise UserError(f"{title} does not fit: {target.__name__} takes {described(hint)} as {name}.")
    if failed and not content.get("_partial_"):
        lacking = [
            name for name, (_, default) in known.items() if default is inspect.Parameter.empty and name not in given
        ]
        for name in lacking:
            added = "_partial_=true, as the module gives it" if name in ("params", "optimizer") else f"{name}=VALUE"
            raise UserError(f"{key}.{name} is missing, which {target.__name__} needs: add +{key}.{added}.")


def found_at(key: str, path: str) -> Any:
    """The class or function of a full name."""
    try:
        return resolve_name(path)
    except Exception as error:  # modules raise anything
        home, _, name = path.rpartition(".")
        nearest = get_close_matches(name, dir(sys.modules.get(home, object)), n=1, cutoff=0.6)
        remedy = f"did you mean {home}.{nearest[0]}?" if nearest else "give the full name of a class that Python finds."
        raise UserError(f"{key}={path} cannot be imported ({one_line(error)}): {remedy}") from error


def referred(raw: Any) -> str | None:
    """The key that an interpolation takes its value from: ``optimizer`` of ``${optimizer}``."""
    found = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)\}", raw) if isinstance(raw, str) else None
    return found[1] if found else None


def is_typed(key: str) -> bool:
    """Whether a key, or a mapping around it, is set on the command line."""
    if not HydraConfig.initialized():
        return False
    own = HydraConfig.get()
    typed = [word.lstrip("+").partition("=")[0] for word in own.overrides.task]
    return any(f"{key}.".startswith(f"{one}.") for one in typed if one not in own.runtime.choices)


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
            parameters = [*inspect.signature(function).parameters.values()][inspect.isclass(target) :]
            hints = get_type_hints(function)
        except Exception:  # it is not in Python, or an annotation names what is not there
            return known, False
        named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        for one in named:
            if not place or one.default is not one.empty:  # the class itself gives its base the others
                known.setdefault(one.name, (hints.get(one.name, Any), one.default))
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            return known, not place
    return known, False


def fits(value: Any, hint: Any) -> bool:
    """Whether an annotation allows a plain value; what is to be built, and annotations by classes, allow anything."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if value == "???" or (isinstance(value, Mapping) and "_target_" in value):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in PLAIN:  # 1 is true, but true is no number
        accepted = {bool: bool | int, float: float | int}.get(origin, origin)
        return isinstance(value, accepted) and (origin is bool or not isinstance(value, bool))
    if origin is Callable or (inspect.isclass(origin) and issubclass(origin, torch.Tensor | torch.nn.Module)):
        return False
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin in (list, tuple, Sequence) or getattr(origin, "__name__", "") in ("Iterable", "Collection"):
        each = inner[0] if inner else Any
        return isinstance(value, list) and (origin is tuple or all(fits(one, each) for one in value))
    return True


def described(hint: Any) -> str:
    """An annotation in words."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        parts = [part for one in inner if one is not torch.Tensor for part in described(one).split(" or ")]
        return " or ".join(dict.fromkeys(part for part in parts if part != PLAIN[int] or PLAIN[float] not in parts))
    if origin is Literal:
        return " or ".join(map(str, inner))
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "a mapping ({KEY: VALUE})"
    if inspect.isclass(origin) and issubclass(origin, Sequence) and origin is not str:
        each = described(inner[0]) if inner else "a value"
        return f"a list ([VALUE, …], each {each})"
    return PLAIN.get(origin, "a class ({_target_: NAME})")


def written(value: Any) -> str:
    """A value as it is typed."""
    plain = {None: "null", True: "true", False: "false"}
    return plain[value] if value is None or isinstance(value, bool) else str(value).replace("'", "")
