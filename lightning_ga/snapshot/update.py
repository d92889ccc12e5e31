"""Tell what a failed update of an optimizer has changed, and remove what it had begun to make."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_ga.snapshot.copies import versions


class UpdateSnapshot:
    """An optimizer's tensors by their versions, and its numbers, before an update: nothing is copied.

    Nor is anything kept alive, but what PyTorch's own optimizers do not replace.

    Fused kernels raise no version of what they write; PyTorch's own optimizers count the step of each
    weight, in a tensor, before such a kernel runs (``torch/optim/adam.py``, ``_fused_adam``).

    An optimizer of a thousand weights keeps thousands of values: where they lie is looked for only when their
    names or types are others. PyTorch's own optimizers write to the weights of a group in order, or to those of each
    device and type in order (``foreach``), once their states are made: then the first ones tell of all.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._own = is_own(optimizer)
        self._layout = _Layout([], [], [])
        self._owners: list[dict[Any, Any]] = []
        self._known_states = 0  # how many weights had a state
        self._is_short = False  # whether only the first weights were looked at
        self._sizes: list[int] = []  # weights of each group
        self._lists: list[list[list[int]]] = []  # of each group: places of weights that are written to in order
        self._numbers: list[float] = []
        self._contents: list[_Contents] = []  # of the optimizer, and of what lies within groups and states
        self._state: _Kept = []
        self._state_versions = versions(())
        self._weights: list[Tensor] = []
        self._versions = versions(())
        self._gradients: _Kept = []
        self._gradient_versions = versions(())

    def take(self, *, short: bool = False) -> None:
        """Look at everything, before an update; ``short``: at the first weights alone, where they tell of all."""
        groups, states = self._optimizer.param_groups, self._optimizer.state
        sizes = [len(group["params"]) for group in groups]
        made = len(states) in (0, sum(sizes)) and len(states) == self._known_states
        in_order = self._own and not any(_hooks_of_others(self._optimizer))  # hooks write where they like
        if short and in_order and made and sizes == self._sizes:
            weights = [*self._first_weights()]
            held = [value for weight in weights if weight in states for value in states[weight].values()]
            self._is_short = all(value is None or isinstance(value, Tensor) for value in held)
            if self._is_short:
                self._mark(weights, [value for value in held if value is not None])
                return
        self._is_short, self._known_states, self._sizes = False, len(states), sizes
        self._lists = [_lists(group["params"]) for group in groups] if self._own else []
        held = self._look_at([*groups, *(state for state in states.values() if isinstance(state, dict))])
        self._mark([weight for group in groups for weight in group["params"]], held)

    def _first_weights(self) -> Iterator[Tensor]:
        """Yield the first weight with a gradient of each list."""
        for group, lists in zip(self._optimizer.param_groups, self._lists):
            weights = group["params"]
            for places in lists:
                yield from islice((weights[at] for at in places if weights[at].grad is not None), 1)

    def _look_at(self, owners: list[dict[Any, Any]]) -> list[Tensor]:
        """Look at what groups and states hold; return their tensors."""
        self._owners = owners
        names = [*chain.from_iterable(owners)]
        values = [*chain.from_iterable(map(dict.values, owners))]
        lengths, types = [*map(len, owners)], [*map(type, values)]
        if not self._layout.fits(lengths, names, types):
            self._layout = _Layout(lengths, names, types)
        self._numbers = [values[place] for place in self._layout.numbers]
        within = [values[place] for place in self._layout.containers]
        self._contents = [*map(_Contents, (vars(self._optimizer), *_containers(within)))]
        return [*(values[place] for place in self._layout.tensors), *_tensors(within)]

    def _mark(self, weights: list[Tensor], held: list[Tensor]) -> None:
        """Note the versions of weights with a gradient, of these, and of what states hold."""
        self._state = self._kept(held)
        self._state_versions = versions(held)
        found = [weight.grad for weight in weights]
        gradients = [gradient for gradient in found if gradient is not None]
        every = len(gradients) == len(weights)
        self._weights = weights if every else [w for w, gradient in zip(weights, found) if gradient is not None]
        self._versions = versions(self._weights)
        self._gradients = self._kept(gradients)
        self._gradient_versions = versions(gradients)

    def begin(self) -> None:
        """Look at the optimizer's attributes again where its step begins: a gradient scaler has set some for it."""
        self._contents[:1] = [_Contents(vars(self._optimizer))]

    def forget(self) -> None:
        """Let go of all tensors, after the update."""
        self._owners, self._state, self._weights, self._gradients = [], [], [], []
        self._contents = []

    def have_changed(self) -> bool:
        """Return whether a weight, its gradient, or a tensor of the state is another now, or may be."""
        if self._is_short and not self._tell_of_all():
            return True
        if any(weight._version != version for weight, version in zip(self._weights, self._versions)):
            return True
        gradients = _alive(self._gradients)
        if any(gradient is not weight.grad for weight, gradient in zip(self._weights, gradients)):
            return True
        if any(g is None or g._version != version for g, version in zip(gradients, self._gradient_versions)):
            return True
        state = zip(_alive(self._state), self._state_versions)
        return any(t is None or t._version != version for t, version in state) or bool(self._stepped())

    def all_have_changed(self) -> bool | None:
        """Return whether that can be seen of all weights with a gradient now; ``None`` where none has one."""
        stepped, marks = self._stepped(), zip(self._weights, self._versions)
        seen = [weight._version != version or id(weight) in stepped for weight, version in marks]
        return all(seen) if seen else None

    def counts_fused_steps(self) -> bool:
        """Return whether no weight is updated by a fused kernel, or some of these have their steps counted."""
        fused = self._fused()
        return not fused or any(self._step_of(weight) is not None for weight in fused)

    def restore(self) -> None:
        """Remove what the failed step had begun to make, and set numbers back."""
        states = self._optimizer.state
        new = {*[*states][self._known_states :]}
        for key in [key for key, state in states.items() if key in new or not state]:
            del states[key]
        ends = [0, *self._layout.ends]
        for owner, (start, end) in zip(self._owners, pairwise(ends)):
            for name in owner.keys() - set(self._layout.names[start:end]):
                del owner[name]
        numbers = dict(zip(self._layout.numbers, self._numbers))
        for owner, (start, end) in zip(self._owners, pairwise(ends)):
            for place in range(start, end):
                if place in numbers:
                    owner[self._layout.names[place]] = numbers[place]
        for contents in self._contents:
            contents.restore()

    def _tell_of_all(self) -> bool:
        """Return whether the first weights are still that, and all others of their lists have states of their kind."""
        first, states = {*map(id, self._weights)}, self._optimizer.state
        for group in self._optimizer.param_groups:
            for places in _lists(group["params"]):
                trained = [w for w in (group["params"][at] for at in places) if w.grad is not None]
                kinds = {tuple((name, value is None) for name, value in states.get(w, {}).items()) for w in trained}
                if trained and (len(kinds) > 1 or id(trained[0]) not in first):
                    return False
        return True

    def _kept(self, tensors: list[Tensor]) -> "_Kept":
        return tensors if self._own else [*map(weakref.ref, tensors)]

    def _fused(self) -> list[Tensor]:
        """Return the weights that a fused kernel of PyTorch's updates."""
        groups = [group for group in self._optimizer.param_groups if group.get("fused")] if self._own else []
        fused = {id(weight) for group in groups for weight in group["params"]}
        return [weight for weight in self._weights if id(weight) in fused]

    def _stepped(self) -> set[int]:
        """Return weights that a fused kernel may have updated: a count made in this step begins at version 0."""
        known = {id(tensor): version for tensor, version in zip(_alive(self._state), self._state_versions)}
        steps = [(weight, self._step_of(weight)) for weight in self._fused()]
        return {id(weight) for weight, step in steps if step is not None and step._version > known.get(id(step), 0)}

    def _step_of(self, weight: Tensor) -> Tensor | None:
        """Return the tensor that counts the steps of a weight, if there is one."""
        step = self._optimizer.state.get(weight, {}).get("step")
        return step if isinstance(step, Tensor) else None


_Kept = Sequence[Tensor | weakref.ref[Tensor]]


def _alive(kept: _Kept) -> list[Tensor | None]:
    return [each if isinstance(each, Tensor) else each() for each in kept]


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Return a context in which a step runs no hooks of others before it: they have run."""
    kept = [(hooks, dict(hooks)) for hooks in _hooks_of_others(optimizer)]
    for hooks, before in kept:
        for key, hook in before.items():
            if not _is_ours(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()  # in the order that they had
            hooks.update(before)


def _hooks_of_others(optimizer: Optimizer) -> list[dict[int, Any]]:
    """Return the tables of hooks before a step that hold hooks of others (``torch/optim/optimizer.py``, torch 2.15)."""
    tables: tuple[Any, ...] = optimizer._optimizer_step_pre_hooks, torch_optimizer._global_optimizer_pre_hooks
    return [table for table in tables if not all(map(_is_ours, table.values()))]


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("lightning_ga.")


def _lists(weights: Iterable[Tensor]) -> list[list[int]]:
    """Return the places of weights by their device and type, as PyTorch's optimizers list them."""
    lists: dict[object, list[int]] = {}
    for place, weight in enumerate(weights):
        lists.setdefault((weight.device, weight.dtype), []).append(place)
    return [*lists.values()]


class _Layout:
    """Where the numbers and tensors lie among the values of an optimizer's groups and states, in order."""

    def __init__(self, lengths: list[int], names: list[Any], types: list[type]) -> None:
        self._lengths, self.names, self._types = lengths, names, types
        self.ends = [*accumulate(lengths)]
        places = [place for place, name in enumerate(names) if name != "params"]
        self.numbers = [place for place in places if issubclass(types[place], (int, float))]
        self.tensors = [place for place in places if issubclass(types[place], Tensor)]
        self.containers = [place for place in places if issubclass(types[place], (dict, list, tuple))]

    def fits(self, lengths: list[int], names: list[Any], types: list[type]) -> bool:
        """Return whether these are the same."""
        return types == self._types and names == self.names and lengths == self._lengths


class _Contents:
    """The names and numbers of a dictionary, or the length and numbers of a list.

    Args:
        container: A dictionary or a list.
    """

    def __init__(self, container: Any) -> None:
        self._container = container
        items = container.items() if isinstance(container, dict) else enumerate(container)
        self._length, self._names = len(container), {*container} if isinstance(container, dict) else None
        self._numbers = [(name, value) for name, value in items if isinstance(value, (int, float))]

    def restore(self) -> None:
        """Remove what was added, and set numbers back."""
        if self._names is None:
            del self._container[self._length :]
        else:
            for name in self._container.keys() - self._names:
                del self._container[name]
        if self._names is not None or len(self._container) == self._length:
            for name, number in self._numbers:
                self._container[name] = number


def is_own(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is PyTorch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among values, in whatever they lie."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


def _containers(values: Any) -> Iterator[Any]:
    """Yield the dictionaries and lists among values, in whatever they lie."""
    for value in values:
        if isinstance(value, (dict, list, tuple)):
            if not isinstance(value, tuple):
                yield value
            yield from _containers(value.values() if isinstance(value, dict) else value)
