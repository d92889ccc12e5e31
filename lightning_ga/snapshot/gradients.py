"""Tell which gradients a failed backward pass has touched, and restore those that are half done.

A gradient that it has touched holds that pass's whole contribution, as autograd adds to a
parameter's gradient once, when all of it is summed: so the next attempt leaves it alone. Nothing is
copied for that. The first pass that goes through shows for which parameters it does not hold.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import compress
from operator import eq
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_ga.snapshot.copies import versions

Mark = tuple[int, int]
"""Which tensor a gradient is, and how often that was written to."""
_NO_GRADIENT: Mark = (0, 0)


LOOKS = 8  # passes before which all gradients are looked for anew


class GradientSnapshot:
    """Gradients before an attempt, by their versions: nothing is copied but what is added to more than once.

    Args:
        parameters: Parameters that may have a gradient.
        repeated: Those that a backward pass adds to more than once; see ``Accumulations``.
        known: The gradients of all parameters before an earlier pass; ``None`` to look for them.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        repeated: Sequence[Tensor] = (),
        known: Sequence[Tensor | None] | None = None,
    ) -> None:
        self._parameters, self._repeated = parameters, repeated
        self._copies: list[Tensor | None] = []
        if repeated:
            apart = set(map(id, repeated))
            self._parameters = [parameter for parameter in parameters if id(parameter) not in apart]
            self._copies = [None if p.grad is None else p.grad.clone() for p in repeated]
        # In the order of the parameters that are not repeated.
        self.gradients: Sequence[Tensor | None] = known or [parameter.grad for parameter in self._parameters]
        self._is_known = known is not None
        self._versions = versions(self.gradients)

    @cached_property
    def _before(self) -> dict[int, int]:
        """The version of each gradient, by the ``id`` of its parameter."""
        return dict(zip(map(id, self._parameters), self._versions))

    def are_complete(self, parameters: Sequence[Tensor], now: Sequence[int]) -> bool:
        """Return whether all of these have the whole contribution of the attempt's samples, as far as that shows.

        Args:
            parameters: Parameters.
            now: The versions of their gradients.
        """
        before = [*map(self._before.get, map(id, parameters))]
        if None in before:
            return False
        alike = set(compress(map(id, parameters), map(eq, before, now)))
        marks = zip(self._parameters, self.gradients, self._versions) if alike else ()
        return all(_has_changed(*mark) for mark in marks if id(mark[0]) in alike)

    def lost(self) -> str | None:
        """Name what may have happened before the attempt, or in it: nobody knows."""
        pairs = zip(self._parameters, self.gradients) if self._is_known else ()
        replaced = any(gradient is not None and parameter.grad is not gradient for parameter, gradient in pairs)
        return "gradients, other tensors being in their place now" if replaced else None

    def restore(self) -> list[Tensor]:
        """Undo what can be half done; return parameters that have the whole contribution of the attempt's samples."""
        with torch.no_grad():
            for parameter, gradient in zip(self._repeated, self._copies):
                if gradient is None or parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)
        marks = zip(self._parameters, self.gradients, self._versions)
        return [parameter for parameter, gradient, version in marks if _has_changed(parameter, gradient, version)]


def _has_changed(parameter: Tensor, gradient: Tensor | None, version: int) -> bool:
    """Return whether a parameter has another gradient, or one that was written to."""
    return parameter.grad is not gradient or (gradient is not None and gradient._version != version)


class WindowGradientMarks:
    """Takes snapshots of gradients before the passes of a window, but the first, which begins without gradients.

    To look for the gradients of thousands of parameters takes longer than to read their versions. In a window it is
    done once, after it has shown that passes add to gradients and put no others in their place. Parameters without
    a gradient are looked at each time.
    """

    def __init__(self) -> None:
        self._looks = LOOKS
        self._parameters: Sequence[Tensor] = ()
        self._known: list[Tensor | None] = []
        self._without: list[int] = []  # places of parameters that had no gradient

    def take(self, parameters: Sequence[Tensor], repeated: Sequence[Tensor] = ()) -> GradientSnapshot:
        """Take a snapshot."""
        if repeated:
            return GradientSnapshot(parameters, repeated)
        known = self._known if parameters is self._parameters else []
        if not known or self._looks:
            taken = GradientSnapshot(parameters)
            if self._looks:
                self._learn(known, taken.gradients)
            self._parameters, self._known = parameters, [*taken.gradients]
            self._without = [place for place, gradient in enumerate(self._known) if gradient is None]
            return taken
        for place in self._without:
            known[place] = parameters[place].grad
        return GradientSnapshot(parameters, known=known)

    def forget(self) -> None:
        """Let go of the gradients, where a window is over."""
        self._parameters, self._known, self._without = (), [], []

    def _learn(self, before: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> None:
        """Go on looking for as long as gradients are replaced."""
        replaced = any(old is not None and old is not new for old, new in zip(before, now))
        self._looks = LOOKS if replaced else max(0, self._looks - bool(before))


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


@contextmanager
def left_alone(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Return a context in which backward passes add nothing to the gradients of these parameters."""
    hooks = AccumulationHooks(parameters, zeros)
    try:
        yield
    finally:
        hooks.remove()


@contextmanager
def set_apart(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Return a context in which these have copies of their gradients, and after which they have those as before."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, gradient in kept:
            parameter.grad = None if gradient is None else gradient.clone()
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


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
