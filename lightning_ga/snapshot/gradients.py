"""Gradients as backward passes add to them: in which order, how often, and what is added."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_ga.snapshot.copies import versions


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of some parameters at one moment, and how often each had been written to."""

    tensors: list[Tensor | None]
    versions: Sequence[int]

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> "Gradients":
        """Look at the gradients of parameters."""
        tensors = [parameter.grad for parameter in parameters]
        return cls(tensors, versions(tensors))

    def unchanged_since(self, before: "Gradients") -> bool:
        """Return whether none has been replaced or written to in between."""
        return self.versions == before.versions and all(map(is_, self.tensors, before.tensors))

    def changed_since(self, before: "Gradients") -> Iterator[bool]:
        """Yield for each whether it is there, and has been replaced or written to in between."""
        pairs = zip(self.tensors, before.tensors, self.versions, before.versions)
        return (now is not None and (now is not then or new != old) for now, then, new, old in pairs)


@contextmanager
def counted_additions(parameters: Iterable[Tensor]) -> Iterator[Counter[Tensor]]:
    """Return a context in which additions of backward passes to gradients are counted, in the order in which they come.

    A table of hooks that is left empty makes every later backward pass take the interpreter's lock (1 µs for each
    parameter in torch 2.15). The table of hooks before a gradient is added can be dropped, that of those after not.
    """
    counts: Counter[Tensor] = Counter()
    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]

    def count(parameter: Tensor, _: Tensor) -> None:
        counts[parameter] += 1

    handles = [parameter.register_hook(partial(count, parameter)) for parameter in trained]
    try:
        yield counts
    finally:
        for parameter, handle in zip(trained, handles):
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None


class ZeroedAdditions:
    """Lets backward passes add zeros to gradients, until it is removed.

    Hooks are on the nodes that add, not on the parameters: so they come after all hooks of the user's own, and
    ``autograd.grad`` does not call them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # Kept, as parameters do not keep them.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
        self._handles: list[Any] = [node.register_prehook(_zeros) for node in self._nodes]

    def remove(self) -> None:
        """Let gradients be added as they come."""
        for handle in self._handles:
            handle.remove()
        self._nodes, self._handles = [], []


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in gradients)


def sparse_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return weights of embeddings that ask for sparse gradients, and every parameter that has one now."""
    asked = [getattr(part, "weight", None) for part in module.modules() if getattr(part, "sparse", False)]
    having = [parameter for parameter in module.parameters() if parameter.grad is not None and parameter.grad.is_sparse]
    return list({id(p): p for p in (*asked, *having) if isinstance(p, torch.nn.Parameter)}.values())


def coalesce_gradients(parameters: Iterable[Tensor]) -> None:
    """Keep one entry a row in sparse gradients: backward passes append theirs."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
