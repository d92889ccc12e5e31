"""Record the optimizer steps of a training: their gradients, the weights these belong to, and what was read before.

Tested in tests/test_audit.py.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_ga.errors import UserError


@dataclass(frozen=True, slots=True)
class Seen:
    """One optimizer step."""

    read: int  # micro-batches since the step before
    weights: Tensor  # of the whole model, flat
    modes: list[bool]  # whether each module is in training mode
    gradients: dict[str, Tensor]  # by the name of the parameter
    has_moved: bool  # whether weights changed since the step before


class Recorder:
    """Sees optimizer steps, and counts backward passes unless something else counts what was read."""

    def __init__(self, model: Module, read: Callable[[], int] | None = None) -> None:
        self.model = model
        self.steps: list[Seen] = []
        self.ranks = 1
        self._read = read or self._passes
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._after = flat(model)
        self._is_stepping = False

    @contextmanager
    def watching(self) -> Iterator["Recorder"]:
        """See what happens within."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before).remove)
            stack.callback(register_optimizer_step_post_hook(self._finish).remove)
            for each in self.model.parameters():
                if each.requires_grad:
                    stack.callback(each.register_post_accumulate_grad_hook(self._count).remove)  # type: ignore[no-untyped-call]
            yield self

    def _count(self, parameter: Tensor) -> None:
        self._counts[id(parameter)] += 1  # hashing a tensor takes longer

    def _passes(self) -> int:
        return max(self._counts.values(), default=0) * self.ranks

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Note a step: now, or once its closure has computed the gradient."""
        if self._is_stepping:  # an optimizer that steps another one
            return None
        self._is_stepping = True
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._note(optimizer)
            return None
        evaluations: list[Any] = []

        def noted() -> Any:
            evaluations.append(closure())
            if len(evaluations) > 1:
                raise UserError(f"{type(optimizer).__name__} evaluates its loss several times a step: no audit.")
            self._note(optimizer)
            return evaluations[0]

        if "closure" in kwargs:
            return args, {**kwargs, "closure": noted}
        return (optimizer, noted, *args[2:]), kwargs

    def _finish(self, *_: Any) -> None:
        self._is_stepping = False
        with DisableTorchFunction():  # the mode that promotes takes time
            self._after = flat(self.model)

    def _note(self, optimizer: Optimizer) -> None:
        """Keep the gradients that a step uses, and the weights they belong to."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        stepped = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        ids = {*map(id, stepped)}
        foreign = ids - names.keys()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.ranks = torch.distributed.get_world_size()
        total = self._read()
        if foreign == ids or not total:  # of another model, or before training
            return
        if foreign:
            raise UserError(
                f"The optimizer steps {len(foreign)} tensors that model= lacks: give one module that has all."
            )
        read = total - self._total
        self._total = total
        with DisableTorchFunction():
            gradients = {names[id(each)]: _gradient_of(each) for each in stepped}
            modes = map(attrgetter("training"), self.model.modules())
            self._append(Seen(read, flat(self.model), [*modes], gradients, has_moved=False))

    def _append(self, seen: Seen) -> None:
        """Keep a step, unless it belongs to the one before; that one is dropped if it was a trial."""
        if self.steps:
            last = self.steps[-1]
            if not seen.read and not last.gradients.keys() & seen.gradients.keys():
                last.gradients.update(seen.gradients)  # two optimizers share a backward pass
                return
            has_moved = not torch.equal(seen.weights, self._after)
            changed_nothing = not any(map(torch.any, last.gradients.values()))
            is_put_back = torch.equal(seen.weights, last.weights)
            if is_put_back and (has_moved or changed_nothing):
                self.steps.pop()  # a trial
            else:
                seen = replace(seen, has_moved=has_moved)
        self.steps.append(seen)


def flat(model: Module) -> Tensor:
    """Copy all parameters, one behind the other."""
    return torch.cat([real(each.detach()).flatten() for each in model.parameters()])


def real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real and imaginary parts."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return real(torch.zeros_like(parameter)).flatten()
    return real(gradient.detach().to_dense()).flatten().clone()
