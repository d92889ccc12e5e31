"""Compare the gradient of one submodule with and without being computed again, within a forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from lightning_ga.batch.pytree import same_values, tensors_in
from lightning_ga.errors import UserError
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.recompute.state import ForwardEffects, PassState
from lightning_ga.recompute.wrapper import RunTwice, own_containers
from lightning_ga.snapshot.random_numbers import GENERATORS

TOLERANCE = {torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TOLERANCE_FLOAT32 = 1e-4  # kernels of devices sum in any order


class Comparison:
    """The forward pass of a submodule; before its first one, it runs alone, plainly and computed again."""

    def __init__(self, name: str, part: Module) -> None:
        self._name, self._part, self._forward = name, part, part.forward
        self._is_done = False
        self.difference = ""  # a sentence

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it."""
        if torch.is_grad_enabled() and not self._is_done:
            self._is_done = True
            given = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, GENERATORS)]
            before, _ = ForwardEffects(self._part, self._name).before_call(given)
            try:
                with saved_tensors_hooks(_keep, _keep):
                    difference = self._compare(before, arguments, named)
                if difference:
                    self.difference = f"{self._name} keeps its activations: computed again, it {difference}."
            except UserError as error:
                self.difference = str(error)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                said = str(error).partition("\n")[0].partition(". ")[0].rstrip(".:")
                kind = type(error).__name__
                self.difference = f"{self._name} keeps its activations: computed again, it ends in {kind}: {said}."
            before.restore()
        return self._forward(*arguments, **named)

    def _compare(self, before: PassState, arguments: Any, named: Any) -> str:
        plain = self._gradient(self._forward, arguments, named)
        after_plain = before.now()
        before.restore()
        # Hooks of old weight norms make tensors outside of the forward pass: their graph serves both.
        again = self._gradient(RunTwice(self._part, self._name, self._forward), arguments, named)
        if not same_values(plain, again):
            error = max(map(_relative_error, plain, again))
            if not error <= 0:
                return f"gives another gradient (relative difference {error:.1g})"
        return after_plain.difference(before.now())

    def _gradient(self, forward: Callable[..., Any], arguments: Any, named: Any) -> list[Tensor]:
        """Return outputs of a forward pass, and their gradient by its arguments and parameters."""
        leaves: dict[int, tuple[Tensor, Tensor]] = {}

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return own_containers(leaf)
            if id(leaf) not in leaves:
                source = leaf.detach().clone().requires_grad_()
                leaves[id(leaf)] = source, source.clone()
            return leaves[id(leaf)][1]

        arguments, named = tree_map(copied, (arguments, named))
        outputs = [each for each in tensors_in(forward(*arguments, **named)) if each.requires_grad]
        sources = [source for source, _ in leaves.values()] + [p for p in self._part.parameters() if p.requires_grad]
        if not outputs or not sources:
            return outputs
        weights = [torch.arange(each.numel(), device=each.device).cos().view(each.shape).to(each) for each in outputs]
        found = torch.autograd.grad(outputs, sources, weights, allow_unused=True, retain_graph=True)
        return [*(each.detach() for each in outputs), *(each for each in found if each is not None)]


def _keep(tensor: Tensor) -> Tensor:
    return tensor


def _relative_error(one: Tensor, other: Tensor) -> float:
    """Return how much of the norm two tensors differ, if that is more than rounding; else 0."""
    if one.shape != other.shape:
        return float("inf")
    dense = [each.to_dense().to(torch.complex128) for each in (one, other)]
    error = float((dense[0] - dense[1]).norm() / dense[0].norm().clamp(min=1e-30))
    return 0.0 if error <= TOLERANCE.get(one.dtype, TOLERANCE_FLOAT32) else error
