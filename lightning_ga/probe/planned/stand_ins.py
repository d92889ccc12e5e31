"""What stands in for a module, its optimizers and its batches: tensors of the same shapes, without values."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ga.batch.pytree import is_constant, is_plain_sequence, open_container, rebuild
from lightning_ga.snapshot.state import refuse_lazy

_RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)


@contextmanager
def without_values(
    module: torch.nn.Module, optimizers: list[torch.optim.Optimizer], *, foreach: bool
) -> Iterator[tuple[FakeTensorMode, dict[int, Any]]]:
    """Give a module and its optimizers tensors without values, as a context; afterwards they are as they were.

    Yields the mode that the tensors belong to, and for the id of each original tensor the one that stands for it.
    With ``foreach``, optimizers that leave it open work on many tensors at once, as they do on CUDA.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tables: list[dict[str, Any]] = [t for m in module.modules() for t in (m._parameters, m._buffers)]
    originals = [tensor for table in tables for tensor in table.values() if tensor is not None]
    refuse_lazy(originals)
    fakes: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in originals}
    gradients = [(tensor, tensor.grad) for tensor in originals if isinstance(tensor, torch.nn.Parameter)]
    for fake in fakes.values():
        fake.grad = None
    with ExitStack() as stack:
        for parameter, gradient in gradients:  # a hook may have kept a parameter itself
            stack.callback(setattr, parameter, "grad", gradient)
        for table in tables:
            stack.callback(table.update, dict(table))
            table.update({name: tensor if tensor is None else fakes[id(tensor)] for name, tensor in table.items()})
        for optimizer in optimizers:
            stack.callback(_refill(optimizer))
            _let_go_of_values(optimizer, mode, fakes, foreach=foreach)
        yield mode, fakes


def _refill(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Keep an optimizer's state and groups; the function puts them back."""
    state, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    parameters = [list(group["params"]) for group in optimizer.param_groups]

    def refill() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, settings, kept in zip(optimizer.param_groups, groups, parameters):
            group.clear()
            group.update(settings)
            group["params"][:] = kept

    return refill


def _let_go_of_values(
    optimizer: torch.optim.Optimizer, mode: FakeTensorMode, fakes: dict[int, Any], *, foreach: bool
) -> None:
    """Give an optimizer parameters and state without values."""
    states = {fakes.get(id(key), key): _faked(state, mode) for key, state in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(states)
    for group in optimizer.param_groups:
        group["params"][:] = [fakes.get(id(parameter), parameter) for parameter in group["params"]]
        if foreach and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _faked(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, dict):
        return {key: _faked(inner, mode) for key, inner in value.items()}
    return [_faked(inner, mode) for inner in value] if isinstance(value, list) else value


def grown(small: Any, large: Any, periods: int) -> Any:
    """Extrapolate a batch without values from two that differ by one period, to so many more than ``small`` has.

    Examples:
        >>> small, large = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> grown({"x": small, "n": [1, 2]}, {"x": large, "n": [1, 2, 1, 2]}, periods=3)["x"].shape
        torch.Size([8, 3])
    """
    if isinstance(small, Tensor):
        shape = [a + (b - a) * periods for a, b in zip(small.shape, large.shape)]
        channels_last = small.dim() == 4 and not small.is_contiguous()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(shape, dtype=small.dtype, memory_format=layout)
    if isinstance(small, int) and not isinstance(small, bool):
        return small + (large - small) * periods
    if is_plain_sequence(small) and len(small) != len(large):  # one item a sample
        items = [*small, *(item for _ in range(periods) for item in large[len(small) :])]
        return type(small)([grown(item, item, 0) for item in items])
    content = open_container(small)
    if content is not None:
        more = open_container(large) or ()
        return rebuild(small, [grown(one, other, periods) for (_, one), (_, other) in zip(content, more)])
    if is_constant(small) or not hasattr(small, "__dict__"):
        return large
    grown_object = copy(small)
    vars(grown_object).update({name: grown(one, vars(large)[name], periods) for name, one in vars(small).items()})
    return grown_object


def hidden_workspaces(module: torch.nn.Module) -> Iterator[str]:
    """Name the modules whose memory tensors without values do not show, each with the reason."""
    for name, child in module.named_modules():
        if isinstance(child, _RECURRENT):
            yield f"{name or 'the module'} ({type(child).__name__}): the workspace of recurrent kernels is not seen"
        elif type(child).__name__ == "OptimizedModule":
            yield f"{name or 'the module'}: compiled, and estimated as if it were not"
