"""Compare the gradient of one submodule with and without being computed again, within a forward pass.

Tested in tests/recompute/test_wrapper.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_ga.batch.pytree import same_values, tensors_in
from lightning_ga.memory.oom import attempt
from lightning_ga.recompute.state import ForwardEffects
from lightning_ga.recompute.wrapper import RunTwice
from lightning_ga.snapshot.copies import by_id, with_own_containers

ANOTHER = "computed again, it gives another gradient."


def difference(part: Module, name: str, forward: Callable[..., Any], arguments: Any, named: Any) -> str:
    """Return in what a submodule differs if it is computed again, with these arguments; empty if in nothing.

    Plainly and computed again, it starts from the state of now, and leaves it.
    """
    now = ForwardEffects(part, name).before_call([arguments, named])

    def compare() -> None:
        found = []
        # Hooks of old weight norms make tensors outside of the forward pass: their graph serves both.
        for each in (forward, RunTwice(part, name, forward)):
            with now, saved_tensors_hooks(Tensor.detach, Tensor.detach):
                found.append(_gradient(part, each, arguments, named))
        for plain, again in zip(*found, strict=True):
            _require_close(plain, again)

    failure = attempt(compare, lambda error: isinstance(error, Exception)).failure
    if failure is None:
        return ""
    return str(failure).partition("\n")[0] or repr(failure)


def _require_close(plain: Tensor, again: Tensor) -> None:
    """Raise if two tensors differ by more than rounding explains; NaN is equal to NaN."""
    if same_values(plain, again):
        return
    plain = plain.detach().to_dense()
    most = torch.finfo(plain.dtype).eps ** 0.5 * float(plain.abs().max())
    torch.testing.assert_close(again.detach().to_dense(), plain, rtol=0, atol=most, msg=ANOTHER)


def _gradient(part: Module, forward: Callable[..., Any], arguments: Any, named: Any) -> list[Tensor]:
    """Return outputs of a forward pass, and their gradient by its arguments and parameters."""
    leaves, structure = tree_flatten((arguments, named))
    given = by_id(filter(_needs_gradient, tensors_in(leaves)))
    sources = {number: tensor.detach().clone().requires_grad_() for number, tensor in given.items()}
    copies = {number: source.clone() for number, source in sources.items()}
    arguments, named = tree_unflatten([with_own_containers(leaf, copies) for leaf in leaves], structure)
    outputs = list(filter(_needs_gradient, tensors_in(forward(*arguments, **named))))
    inputs = [*sources.values(), *filter(_needs_gradient, part.parameters())]
    if not outputs or not inputs:
        return outputs
    weights = list(map(_weights, outputs))
    found = torch.autograd.grad(outputs, inputs, weights, allow_unused=True, retain_graph=True)
    return [*map(Tensor.detach, outputs), *(gradient for gradient in found if gradient is not None)]


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _weights(output: Tensor) -> Tensor:
    """Return weights by which all elements of an output are summed, each another."""
    return torch.arange(output.numel(), device=output.device).cos().view(output.shape).to(output)
