"""Tell what a failed update of an optimizer has changed, and remove what it had begun to make."""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class UpdateSnapshot:
    """An optimizer's tensors by their versions, and its numbers: nothing is copied.

    Nor is anything kept alive, but the gradients of PyTorch's own optimizers, which do not replace them.

    Fused kernels raise no version of what they write; PyTorch's own optimizers count the step of each
    weight, in a tensor, before such a kernel runs (``torch/optim/adam.py``, ``_fused_adam``).

    Args:
        optimizer: The optimizer, with gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        states = [state for state in optimizer.state.values() if state and isinstance(state, dict)]
        weights = [weight for group in groups for weight in group["params"]]
        found = [weight.grad for weight in weights]
        gradients = [gradient for gradient in found if gradient is not None]
        every = len(gradients) == len(weights)
        self._weights = weights if every else [w for w, gradient in zip(weights, found) if gradient is not None]
        self._versions = [weight._version for weight in self._weights]
        self._gradients: list[Any] = gradients if is_own(optimizer) else [*map(weakref.ref, gradients)]
        self._gradient_versions = [gradient._version for gradient in gradients]
        self._names = [(owner, [*owner]) for owner in (*groups, *states)]
        self._numbers = [(o, name, v) for o, _ in self._names for name, v in o.items() if isinstance(v, (int, float))]
        settings = ({name: value for name, value in group.items() if name != "params"} for group in groups)
        held = [tensor for owner in (*settings, *states) for tensor in _tensors(owner)]
        apart = set(map(id, weights)) if held else set()
        self._others = [(weakref.ref(tensor), tensor._version) for tensor in held if id(tensor) not in apart]
        fused = [group for group in groups if group.get("fused")] if is_own(optimizer) else []
        self._fused = [weight for group in fused for weight in group["params"] if weight.grad is not None]
        self._steps = {id(weight): [step._version for step in self._steps_of(weight)] for weight in self._fused}

    def have_changed(self) -> bool:
        """Return whether a weight, its gradient, or a tensor of the state is another now."""
        if any(weight._version != version for weight, version in zip(self._weights, self._versions)):
            return True
        gradients = [kept if isinstance(kept, Tensor) else kept() for kept in self._gradients]
        if any(gradient is not weight.grad for weight, gradient in zip(self._weights, gradients)):
            return True
        if any(g is None or g._version != version for g, version in zip(gradients, self._gradient_versions)):
            return True
        others = ((tensor(), version) for tensor, version in self._others)
        return any(t is None or t._version != version for t, version in others) or any(map(self._stepped, self._fused))

    def all_have_changed(self) -> bool | None:
        """Return whether that can be seen of all weights with a gradient now; ``None`` where none has one."""
        stepped = {id(weight) for weight in self._fused if self._stepped(weight)}
        marks = zip(self._weights, self._versions)
        seen = [weight._version != version or id(weight) in stepped for weight, version in marks]
        return all(seen) if seen else None

    def counts_fused_steps(self) -> bool:
        """Return whether no weight is updated by a fused kernel, or some of these have their steps counted."""
        return not self._fused or any(self._steps_of(weight) for weight in self._fused)

    def restore(self) -> None:
        """Remove what the failed step had begun to make, and set numbers back."""
        known = {id(owner) for owner, _ in self._names}
        states = self._optimizer.state
        for key in [key for key, state in states.items() if id(state) not in known or not state]:
            del states[key]
        for owner, names in self._names:
            for name in owner.keys() - set(names):
                del owner[name]
        for owner, name, number in self._numbers:
            owner[name] = number

    def _stepped(self, weight: Tensor) -> bool:
        """Return whether a fused kernel may have updated a weight: a count made in this step begins at version 0."""
        before = self._steps[id(weight)] or [0]
        return any(step._version > version for step, version in zip(self._steps_of(weight), before))

    def _steps_of(self, weight: Tensor) -> list[Tensor]:
        """Return the tensor that counts the steps of a weight, if there is one."""
        step = self._optimizer.state.get(weight, {}).get("step")
        return [step] if isinstance(step, Tensor) else []


def is_own(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is PyTorch's own."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state, in whatever it keeps them."""
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors(value)
