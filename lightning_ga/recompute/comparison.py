"""Compare the gradient of one submodule with and without being computed again, within a forward pass.

Tested in tests/recompute/test_wrapper.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ga.batch.pytree import same_values, tensors_in
from lightning_ga.errors import UserError
from lightning_ga.memory.oom import attempt
from lightning_ga.recompute.state import ForwardEffects
from lightning_ga.recompute.wrapper import RunTwice, own_containers
from lightning_ga.snapshot.random_numbers import GENERATORS


def difference(part: Module, name: str, forward: Callable[..., Any], arguments: Any, named: Any) -> str:
    """Return in what a submodule differs if it is computed again, with these arguments; empty if in nothing.

    Plainly and computed again, it starts from the state of now, and leaves it.
    """
    given = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, GENERATORS)]
    now = ForwardEffects(part, name).before_call(given)
    found: list[list[Tensor]] = []

    def run() -> None:
        # Hooks of old weight norms make tensors outside of the forward pass: their graph serves both.
        for each in (forward, RunTwice(part, name, forward)):
            with now, saved_tensors_hooks(Tensor.detach, _as_it_is):
                found.append(_gradient(part, each, arguments, named))

    failure = attempt(run, lambda error: isinstance(error, Exception)).failure
    if isinstance(failure, UserError):
        return str(failure).rstrip(".")
    if failure is not None:
        said = str(failure).partition("\n")[0].partition(". ")[0].rstrip(".:")
        return f"computed again, it ends in {type(failure).__name__}: {said}"
    plain, again = found
    if same_values(plain, again):
        return ""
    errors = [_relative_error(*pair) for pair in zip(plain, again)]
    worst = max(errors, default=0.0)
    is_same = all(error <= torch.finfo(each.dtype).eps ** 0.5 for error, each in zip(errors, plain))
    return "" if is_same else f"computed again, it gives another gradient (relative difference {worst:.1g})"


def _gradient(part: Module, forward: Callable[..., Any], arguments: Any, named: Any) -> list[Tensor]:
    """Return outputs of a forward pass, and their gradient by its arguments and parameters."""
    leaves: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return own_containers(leaf)
        if id(leaf) not in leaves:
            source = leaf.detach().clone().requires_grad_()
            leaves[id(leaf)] = (source, source.clone())
        return leaves[id(leaf)][1]

    arguments, named = tree_map(copied, (arguments, named))
    outputs = [each for each in tensors_in(forward(*arguments, **named)) if each.requires_grad]
    sources = [source for source, _ in leaves.values()] + [p for p in part.parameters() if p.requires_grad]
    if not outputs or not sources:
        return outputs
    weights = [torch.arange(each.numel(), device=each.device).cos().view(each.shape).to(each) for each in outputs]
    found = torch.autograd.grad(outputs, sources, weights, allow_unused=True, retain_graph=True)
    return [*(each.detach() for each in outputs), *(each for each in found if each is not None)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _relative_error(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference of two tensors, by that of the first."""
    if one.shape != other.shape:
        return float("inf")
    wide = [each.detach().to_dense().to(torch.complex128) for each in (one, other)]
    return float((wide[0] - wide[1]).norm() / wide[0].norm().clamp(min=1e-30))
