"""One call under activation checkpointing: what autograd saves in it is dropped, and made again if it is asked for.

The semantics are those of ``torch.utils.checkpoint`` without reentrance (its notes on nested checkpoints say why): the
innermost call owns what is saved in it, its arguments are saved tensors of the call around it, and a second pass stops
after the last tensor that was saved. For small layers PyTorch's bookkeeping takes a third of the time of a second pass,
so a handle carries its tensor here, and a tensor that is asked for twice is computed twice.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_ga.errors import UserError


class _Handle:
    """Stands for a saved tensor in the graph, and carries it after a second pass until it is asked for."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _SaveArguments(torch.autograd.Function):
    """Saves tensors as autograd does: in the hooks of a call around this one, and refused if they are written to."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing depends on it")


class _LastTensorIsSaved(BaseException):
    """A second pass has made all that is needed; no error, so that nothing in a forward pass catches it."""


class DroppedCall:
    """A call that keeps its tensor arguments alone for the backward pass.

    Args:
        name: What is called, for errors.
        run: Runs the forward pass with the tensors; called again in the backward pass.
        second_pass: Makes the context of each second pass.
    """

    def __init__(
        self, name: str, run: Callable[..., Any], second_pass: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._name, self._run, self._second_pass = name, run, second_pass
        self._handles: list[ref[_Handle]] = []
        self._kinds: list[tuple[Any, ...]] = []  # shape, type and device of each
        self._settings: tuple[Any, ...] = ()

    def first_pass(self, tensors: Sequence[Tensor]) -> Any:
        """Run it, and return the output."""
        self._devices = {"cpu", *(tensor.device.type for tensor in tensors)}
        self._settings = self._current()
        anchor = torch.empty(0, requires_grad=True)
        self._arguments: Any = _SaveArguments.apply(anchor, *tensors).grad_fn
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._run(*tensors)

    def _pack(self, tensor: Tensor) -> _Handle:
        handle = _Handle()
        self._handles.append(ref(handle))
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return handle

    def _unpack(self, handle: _Handle) -> Tensor:
        if handle.tensor is None:
            self._run_again()
        tensor, handle.tensor = handle.tensor, None
        assert tensor is not None
        return tensor

    def _run_again(self) -> None:
        numbers = iter(range(len(self._handles)))
        last = len(self._handles) - 1

        def pack(tensor: Tensor) -> Tensor:
            """Give the tensor to its handle, if it is still there; a backward pass in the call may need it, too."""
            number = next(numbers, None)
            if number is not None:
                handle = self._handles[number]()
                if (tensor.shape, tensor.dtype, tensor.device) != self._kinds[number]:
                    raise self._error()
                tensor = tensor.detach()
                if handle is not None:
                    handle.tensor = tensor
                if number == last:
                    raise _LastTensorIsSaved
            return tensor

        tensors = self._arguments.saved_tensors
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                self._enter_settings(stack)
                stack.enter_context(self._second_pass())
                stack.enter_context(saved_tensors_hooks(pack, _as_it_is))
                self._run(*tensors)
        except _LastTensorIsSaved:
            return
        raise self._error()

    def _current(self) -> tuple[Any, ...]:
        """Return the settings that belong to a context around the call."""
        kinds = sorted(self._devices)
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return torch.get_default_device(), torch.is_autocast_cache_enabled(), *autocast

    def _enter_settings(self, stack: ExitStack) -> None:
        """Enter the settings of the first pass, if those of the backward pass are others."""
        device, caches, *autocast = self._settings
        now = self._current()
        if device != now[0]:
            stack.enter_context(device)
        if (caches, *autocast) != now[1:]:
            for kind, enabled, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))

    def _error(self) -> UserError:
        return UserError(
            f"{self._name} saves other tensors when it is computed again, so its forward pass depends on something "
            f"outside of it: leave {self._name} out, or make that an argument."
        )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
