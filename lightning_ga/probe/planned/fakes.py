"""Training steps on tensors without values: shapes and dtypes are worked out, nothing is computed or allocated.

Built on PyTorch's ``FakeTensorMode``. Tensors without values stand in for a module, its optimizers and its batches.
What a step reads out of them is answered, so that its control flow goes on: scalars are 1, conditions are those of a
healthy step, and results whose size depends on values (boolean masks) have the largest size that they can have.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_ga.batch.pytree import is_constant, is_plain_sequence, open_container, rebuild
from lightning_ga.snapshot.state import refuse_lazy

_RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)
_DOUBTED = {
    "_scaled_dot_product_attention_math": "attention without a fused kernel here",
    "_coalesce": "sparse gradients: all their rows were taken as different",
}


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
    states = tree_map_only(Tensor, mode.from_tensor, dict(optimizer.state))
    states = {fakes.get(id(key), key): state for key, state in states.items()}
    optimizer.state.clear()
    optimizer.state.update(states)
    for group in optimizer.param_groups:
        group["params"][:] = [fakes.get(id(parameter), parameter) for parameter in group["params"]]
        if foreach and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def grown(small: Any, large: Any, periods: int) -> Any:
    """Extrapolate a batch without values from two that differ by one period, to so many more than ``small`` has."""
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


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what tensors without values cannot, and notes what makes an estimate less certain.

    To be entered within a ``FakeTensorMode``; ``doubt`` is told of what was seen, in words.
    """

    supports_higher_order_operators = True

    def __init__(self, doubt: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._doubt = doubt

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; where its result depends on values, answer."""
        kwargs = kwargs or {}
        self._examine(func)
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:
            return _value(func, args)
        except DynamicOutputShapeException:
            return self._largest(func, args, kwargs)
        if isinstance(out, Tensor) and out.dtype is torch.bool:
            out._truth = _truth(_name(func), args)  # type: ignore[attr-defined]
        return out

    def _examine(self, func: Any) -> None:
        namespace, name = getattr(func, "namespace", ""), _name(func)
        if namespace not in ("aten", "prim", "prims", "profiler", "higher_order"):
            self._doubt(f"{namespace}.{name}: an operator whose scratch memory is not known")
        elif name in _DOUBTED:
            self._doubt(_DOUBTED[name])

    def _largest(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a result of the largest size that it can have."""
        name = _name(func)
        if name not in _SIZED and name not in _INDEXING:
            raise
        if not any(args[2:3]) or name != "bincount":  # counts of known classes have a known size
            self._doubt(f"{name}: its size depends on values, and was taken at its largest")
        return _with_indices(func, args, kwargs) if name in _INDEXING else _SIZED[name](*args, **kwargs)


class PlainCopies(TorchFunctionMode):
    """Let tensors without values be copied deeply, as a context: PyTorch 2.15 tries to copy their storages."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or copy."""
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def _name(func: Any) -> str:
    return str(getattr(func, "_opname", getattr(func, "__name__", func)))


def _truth(name: str, args: Any) -> bool:
    """Return a condition as a healthy step finds it: everything is finite, and nothing else holds."""
    known = [getattr(value, "_truth", False) for value in args if isinstance(value, Tensor)]
    if name in ("logical_not", "bitwise_not"):
        return not known[0]
    if name in ("mul", "logical_and", "bitwise_and"):
        return all(known)
    if name in ("logical_or", "bitwise_or", "view", "reshape", "detach", "clone", "alias", "squeeze", "unsqueeze"):
        return any(known)
    if name in ("eq", "ne") and len(args) > 1:  # ``isfinite`` is made of "equal to itself" and "not infinite"
        return args[0] is args[1] if name == "eq" else not isinstance(args[1], Tensor) and args[1] == math.inf
    return name in ("all", "isfinite")


def _value(func: Any, args: Any) -> Any:
    """Return what a step reads: a condition as a healthy step finds it, or 1."""
    if _name(func) in ("equal", "is_same_size"):
        return True
    tensor = args[0]
    if tensor.dtype is torch.bool:
        return getattr(tensor, "_truth", False)
    if tensor.dtype.is_complex:
        return 1 + 0j
    return 1.0 if tensor.dtype.is_floating_point else 1


def _bincount(_: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return torch.empty(max(1, minlength), dtype=torch.int64 if weights is None else torch.float64)


def _unique(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    inverse, counts = torch.empty(tensor.shape, dtype=torch.int64), torch.empty(tensor.numel(), dtype=torch.int64)
    return tensor.new_empty(tensor.numel()), inverse, counts


_SIZED: dict[str, Callable[..., Any]] = {
    "nonzero": lambda tensor: torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64),
    "masked_select": lambda tensor, mask: tensor.new_empty((tensor.bool() & mask).numel()),
    "bincount": _bincount,
    "_unique2": _unique,
    "unique_consecutive": _unique,
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")


def _with_indices(func: Any, args: Any, kwargs: Any) -> Any:
    """Index with masks, as if they were true everywhere."""
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
        else:
            indices += [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
    return func(args[0], indices, *args[2:], **kwargs)
