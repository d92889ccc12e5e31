"""What a configuration gives a class, compared with the signature of the class: keys by their names, as typed."""

import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter
from pkgutil import resolve_name
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from lightning_ga.app.mistakes import LIBRARIES, one_line
from lightning_ga.errors import UserError

LISTS = (list, tuple, Sequence, Iterable, Collection)
WORDS: Mapping[Any, str] = {  # of annotations that a plain value can be compared with
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "null",
    list: "a list ([VALUE, …])",
    dict: "a mapping ({KEY: VALUE})",
    Callable: "a class ({_target_: NAME})",
}
Known = Mapping[str, Parameter]


def check_arguments(key: str, content: Any, *, failed: bool = False) -> None:
    """Refuse arguments that no class can be called with, and values that contradict annotations of libraries.

    Args:
        key: The key of the node.
        content: The node as plain values.
        failed: Whether the class could not be built: annotations of other classes then count too.

    Raises:
        UserError: With the key, its value, and what the class takes.
    """
    if isinstance(content, list):
        for number, value in enumerate(content):
            check_arguments(f"{key}.{number}", value, failed=failed)
    elif isinstance(content, dict):
        for name, value in content.items():
            check_arguments(f"{key}.{name}", value, failed=failed)
        if content.get("_target_", "???") != "???":
            check_call(key, content, failed=failed)


def check_call(key: str, content: Mapping[Any, Any], *, failed: bool) -> None:
    """Compare the values of one node with what its class takes."""
    target = found_at(f"{key}._target_", str(content["_target_"]))
    known, is_closed = arguments_of(target)
    is_library = target.__module__.partition(".")[0] in LIBRARIES
    for name, value in content.items():
        if name.startswith("_") and name.endswith("_"):  # for Hydra
            continue
        if name in known:
            is_true = failed or (is_library and value is not None)
            if is_true and not fits_parameter(value, known[name]):
                takes = f"{target.__name__} takes {described(known[name].annotation)} as {name}"
                raise UserError(f"{key}.{name}={value} does not fit: {takes}.")
        elif is_closed or (failed and known):
            hint = ": it"
            for nearest in get_close_matches(name, known, n=1, cutoff=0.6):
                hint = f"; did you mean {nearest}? It"
            text = f"{key}.{name}={value}: {target.__name__} got an unexpected keyword argument {name!r}"
            raise UserError(f"{text}{hint} takes {', '.join(known)}.")


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


def fits_parameter(value: Any, parameter: Parameter) -> bool:
    """Whether a plain value is of the annotation's kind, or of the default's own; what is to be built is."""
    if value == "???" or (isinstance(value, Mapping) and "_target_" in value):
        return True
    return type(value) is type(parameter.default) or any(fits(value, one) for one in members(parameter.annotation))


def members(annotation: Any) -> Iterator[Any]:
    """The members of a union, else the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from members(member)
    else:
        yield annotation


def kind_of(annotation: Any) -> Any:
    """The entry of ``WORDS`` that an annotation is; ``Callable`` if it has to be built, ``None`` if not known."""
    origin = get_origin(annotation) or annotation
    if origin in WORDS:
        return origin
    if origin in LISTS:
        return list
    if not inspect.isclass(origin):
        return None
    if issubclass(origin, Mapping):
        return dict
    return Callable if issubclass(origin, torch.Tensor | torch.nn.Module) else None


def fits(value: Any, annotation: Any) -> bool:
    """Whether a member of an annotation allows a plain value; annotations by classes allow anything."""
    if get_origin(annotation) is Literal:
        return value in get_args(annotation)
    kind = kind_of(annotation)
    is_whole_number = type(value) is int and kind in (bool, float)
    return kind is None or type(value) is kind or is_whole_number


def described(annotation: Any) -> str:
    """An annotation in words."""
    texts: dict[str, None] = {}
    for member in members(annotation):
        if get_origin(member) is Literal:
            texts |= dict.fromkeys(map(str, get_args(member)))
        elif member is not torch.Tensor:
            texts[WORDS[kind_of(member) or Callable]] = None
    if WORDS[float] in texts:
        texts.pop(WORDS[int], None)
    return " or ".join(texts)
