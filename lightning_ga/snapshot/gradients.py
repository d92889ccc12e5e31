"""Gradients as backward passes add to them: in which order, how often, and which are complete."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_ga.snapshot.copies import versions

Mark = tuple[int, int]
"""Which tensor a gradient is, and how often that was written to."""
_NO_GRADIENT: Mark = (0, 0)


class GradientVersions:
    """The gradients of parameters before a pass, by their versions."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        self._before = dict(zip(map(id, parameters), zip(gradients, versions(gradients))))

    def are_complete(self, parameters: Sequence[Tensor], now: Sequence[int]) -> bool:
        """Return whether all of these have been written to since.

        Args:
            parameters: Parameters.
            now: The versions of their gradients.
        """
        marks = [self._before.get(id(parameter)) for parameter in parameters]
        return all(m is not None and (p.grad is not m[0] or n != m[1]) for p, m, n in zip(parameters, marks, now))


class Accumulations:
    """Counts how often a backward pass adds to each gradient, in the first that goes through.

    Once, as a rule, however often a parameter is used. More than once where backward passes run
    within one another: ``torch.utils.checkpoint`` with ``use_reentrant=True`` does that, and weights
    that several checkpointed parts share are added to by each. Functions that write gradients by
    themselves, as fused kernels do, give autograd nothing to add, or have written before it adds, and
    parameters that are frozen between steps are not counted: what changed otherwise than by one addition
    is taken for one of these.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._counts: Counter[int] = Counter()
        self._marks = [mark_of(parameter) for parameter in self._parameters]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Return a context in which backward passes are watched."""
        hooks = CountingHooks(self._parameters, partial(self._count, dict(zip(map(id, self._parameters), self._marks))))
        try:
            yield
        finally:
            hooks.remove()

    def order(self) -> list[Tensor]:
        """Return parameters in the order in which their gradients came."""
        known = {id(parameter): parameter for parameter in self._parameters}
        return [known[counted] for counted in self._counts]

    def repeated(self) -> list[Tensor]:
        """Parameters that were added to more than once, or nobody knows how often."""
        return [
            parameter
            for parameter, mark in zip(self._parameters, self._marks)
            if self._counts[id(parameter)] != 1 and mark_of(parameter) not in (mark, _NO_GRADIENT)
        ]

    def _count(self, marks: dict[int, Mark], parameter: Tensor) -> None:
        """Just before autograd adds; by then nothing else should have written."""
        self._counts[id(parameter)] += 1 if mark_of(parameter) in (marks[id(parameter)], _NO_GRADIENT) else 2


class AccumulationHooks:
    """Hooks that change what a backward pass is about to add to gradients, until they are removed.

    They are on the nodes that add, not on the parameters: so they come after all hooks of the user's own, and
    ``autograd.grad`` does not call them.

    Args:
        parameters: Parameters; those that want no gradient are passed over.
        hook: Takes a gradient, which may be ``None``; returns what to add instead, or ``None`` to leave it.
    """

    def __init__(self, parameters: Iterable[Tensor], hook: Callable[[Tensor | None], Tensor | None]) -> None:
        def before(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            changed = hook(gradients[0])
            return None if changed is None else (changed,)

        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
        self._handles = [node.register_prehook(before) for node in self._nodes]

    def remove(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
        self._nodes, self._handles = [], []


class CountingHooks:
    """Hooks that are told when a backward pass is about to add to gradients, until they are removed.

    A table of hooks that is left empty makes every later backward pass take the interpreter's lock (1 µs for each
    parameter in torch 2.15). Those of the nodes that add would stay, as ``DistributedDataParallel`` keeps these nodes;
    of parameters they can be dropped.

    Args:
        parameters: Parameters; those that want no gradient are passed over.
        hook: Called with the parameter.
    """

    def __init__(self, parameters: Iterable[Tensor], hook: Callable[[Tensor], None]) -> None:
        def before(parameter: Tensor, node: Any, _: Tensor) -> None:
            if _is_added(node):
                hook(parameter)

        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]
        pairs: Iterable[tuple[Any, Any]] = zip(self._parameters, nodes)
        self._handles = [parameter.register_hook(partial(before, parameter, node)) for parameter, node in pairs]

    def remove(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            if not parameter._backward_hooks:
                parameter._backward_hooks = None
        self._parameters, self._handles = [], []


def _is_added(node: Any) -> bool:
    """Return whether a gradient is about to be added by its node, not to be returned by ``autograd.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how it says that the gradient is returned
        return False


def zeros(gradient: Tensor | None) -> Tensor | None:
    """Return zeros in the place of a gradient."""
    return None if gradient is None else torch.zeros_like(gradient)


def mark_of(parameter: Tensor) -> Mark:
    """Return a mark that changes when a gradient is replaced or written to."""
    gradient = parameter.grad
    return _NO_GRADIENT if gradient is None else (id(gradient), gradient._version)


def sparse_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights of embeddings that ask for sparse gradients, and every parameter that has one now."""
    asked = [getattr(part, "weight", None) for part in module.modules() if getattr(part, "sparse", False)]
    having = [parameter for parameter in module.parameters() if parameter.grad is not None and parameter.grad.is_sparse]
    return list({id(p): p for p in (*asked, *having) if isinstance(p, torch.nn.Parameter)}.values())


def coalesce_gradients(parameters: Iterable[Tensor]) -> None:
    """Keep one entry a row in sparse gradients: backward passes append theirs."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
