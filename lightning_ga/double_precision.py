"""Put a model into float64, and let functions of PyTorch compute in it with data of a lower precision.

Tested in tests/test_audit.py.
"""

import copy
from collections.abc import Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Module, RNNBase
from torch.overrides import TorchFunctionMode

from lightning_ga.dropout import stop_dropping, without_dropout

LOWER = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)


@contextmanager
def in_double(model: Module) -> Iterator[None]:
    """Put a model into float64 and dropout off; put all back, attributes of modules included, also after an error."""
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        for tensor in (*model.parameters(), *model.buffers()):
            stack.callback(setattr, tensor, "data", tensor.data)
            stack.callback(setattr, tensor, "grad", None)
            tensor.data = tensor.data.to(_double_of(tensor.dtype), copy=True)
        for module in model.modules():
            # Its buffers may be rebound, and rates of dropout are attributes.
            stack.callback(vars(module).update, {**vars(module), "_buffers": copy.copy(module._buffers)})
            if isinstance(module, RNNBase):  # it compares the types itself
                stack.callback(
                    module.register_forward_pre_hook(lambda _, *given: _promoted(given), with_kwargs=True).remove
                )
        stop_dropping(model)
        stack.enter_context(without_dropout())
        # PyTorch leaves the mode for a backward pass, which may compute activations again.
        run = Promotion()(torch.autograd.graph._engine_run_backward)
        stack.enter_context(mock.patch("torch.autograd._engine_run_backward", run))
        yield


class Promotion(TorchFunctionMode, ContextDecorator):
    """Functions that get float64 and a lower precision compute in float64; many layers and losses refuse both."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, with all in float64 if an argument or the first of a list is, but if it changes one."""
        named = kwargs or {}
        given = (*args, *named.values())
        if any(map(_is_lower, given)) and any(map(_is_double, given)) and not _changes_first(func):
            args = _promoted(args)
            named = _promoted(named)
        return func(*args, **named)


def _changes_first(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _is_lower(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in LOWER


def _is_double(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128)


def _promoted(value: Any) -> Any:
    if type(value) in (list, tuple):  # states and weights of an LSTM
        return type(value)(map(_promoted, value))
    if type(value) is dict:
        return dict(zip(value, map(_promoted, value.values())))
    return value.to(_double_of(value.dtype)) if _is_lower(value) else value


def _double_of(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.promote_types(dtype, torch.float64)
    return dtype
