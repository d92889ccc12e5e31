"""What an attempt at a step may change, as it was before: buffers, weights, attributes and the batch.

Kept before every attempt, so it has to cost next to nothing: what is small is copied, and of what is
large the version (``_version``) tells whether it has changed, or its values where versions do not tell.
What has changed and was not copied is told, not undone.
"""

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_ga.batch.pytree import open_container
from lightning_ga.snapshot.checksums import checksums, differ
from lightning_ga.snapshot.state import GENERATORS, generator_state, have_moved, is_writable, restore_generator

SMALL = 2**20  # bytes of a buffer that is copied before every attempt
FEW = 64  # tensors of a list that are copied before every attempt
LOOKS = 8  # attempts in which the values of all weights are compared


class BatchMarks:
    """Containers of a batch as they are, to be put back, and versions of its tensors: nothing is copied.

    Args:
        batch: Tensors in any structure.
        by_value: Whether values are compared, too, as the step may change them without raising a version.
    """

    def __init__(self, batch: Any, *, by_value: bool = False) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        self._note("batch", batch)
        self._sums = self._checksums() if by_value else []

    def put_back(self) -> None:
        """Give containers their contents back."""
        for container, kept in self._containers:
            _refill(container, kept)

    def lost(self) -> str | None:
        """The first tensor that was changed in place, in words."""
        changed = self._changed_by_version() or self._changed_by_value()
        return f"its batch in place ({changed[0]})" if changed else None

    def changes_unseen(self) -> bool:
        """Whether values have changed where no version tells."""
        return bool(self._changed_by_value()) and not self._changed_by_version()

    def _changed_by_version(self) -> list[str]:
        return [path for path, tensor, version in self._tensors if tensor._version != version]

    def _changed_by_value(self) -> list[str]:
        pairs = zip(self._tensors, self._sums, self._checksums() if self._sums else ())
        return [path for (path, _, _), before, now in pairs if differ(before, now)]

    def _checksums(self) -> list[int | None]:
        return checksums(tensor for _, tensor, _ in self._tensors)

    def _note(self, path: str, node: Any) -> None:
        if isinstance(node, Tensor):
            if not node.is_inference():
                self._tensors.append((path, node, node._version))
            return
        if isinstance(node, list):
            self._containers.append((node, list(node)))
        elif isinstance(node, MutableMapping):
            self._containers.append((node, dict(node)))
        elif is_dataclass(node) and not isinstance(node, type) and hasattr(node, "__dict__"):
            self._containers.append((vars(node), dict(vars(node))))
        for name, child in open_container(node) or ():
            self._note(path + name, child)


class WeightStash:
    """Copies of the weights that a step itself changes, such as those of a teacher that follows its student.

    The first attempts that go through show which they are. Until then, for weights that change now and
    then, and for weights that are trained (an optimizer that steps within the backward pass has states
    too), a change is noticed, not undone: by versions, by the values of weights that changed without one
    in those first attempts (``weight.data``, fused kernels), and by the steps of optimizers. Whether
    weights want gradients is kept of all.

    Args:
        module: The module whose parameters no optimizer changes within an attempt.
    """

    def __init__(self, module: Module) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parameters = list(module.parameters())
        self._versions: list[int] = []
        self._trained: list[bool] = []
        self._summed = self._parameters  # whose versions may not tell
        self._sums: list[int | None] = []
        self._silent: set[int] = set()  # weights that are trained and change without raising their version
        self._looks = LOOKS
        self._changing: list[Tensor] = []
        self._changing_names: tuple[str, ...] = ()
        self._copies: list[Tensor] = []
        self._stepped: set[str] = set()

    def tensors(self) -> Iterator[Tensor]:
        """The copies."""
        yield from self._copies

    def expect(self, names: Collection[str]) -> None:
        """Copy these weights from the first attempt on, if they are not trained: the step is known to change them."""
        named = ((self._names[id(parameter)], parameter) for parameter in self._parameters)
        self._copy_from_now_on(p for name, p in named if name in names and not p.requires_grad)

    @property
    def is_learning(self) -> bool:
        """Whether the attempts are still to come that show what changes."""
        return self._looks > 0

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of the weights that attempts change."""
        return self._changing_names

    def note_steps(self) -> RemovableHandle:
        """Note the optimizers that step within an attempt, until the handle is removed."""
        stepped = self._stepped
        return register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.add(type(optimizer).__name__))

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what changes, before an attempt."""
        if len(self._copies) != len(self._changing):
            self._copies = [torch.empty_like(parameter) for parameter in self._changing]
        _copy_all(self._copies, self._changing)
        self._versions = [parameter._version for parameter in self._parameters]
        self._sums = checksums(self._summed)
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._stepped.clear()

    def learn(self) -> None:
        """An attempt went through."""
        if not self._looks:
            return
        self._looks -= 1
        changed, known = self._changed(), {id(parameter) for parameter in self._changing}
        self._copy_from_now_on(p for p in changed if not p.requires_grad and id(p) not in known)
        self._silent |= {id(parameter) for parameter in self._changed_by_value() if parameter.requires_grad}
        if not self._looks:
            self._summed = [parameter for parameter in self._parameters if id(parameter) in self._silent]

    def put_back(self) -> None:
        """Write the copies back."""
        _copy_all(self._changing, self._copies)
        for parameter, trained in zip(self._parameters, self._trained):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)

    def lost(self) -> str | None:
        """A weight that has changed and of which there is no copy, in words."""
        if self._stepped:
            return f"weights by an optimizer of its own ({min(self._stepped)})"
        copied = {id(parameter) for parameter in self._changing}
        lost = [parameter for parameter in self._changed() if id(parameter) not in copied]
        return f"weights without an optimizer ({self._names[id(lost[0])]})" if lost else None

    def _copy_from_now_on(self, parameters: Iterable[Tensor]) -> None:
        self._changing += parameters
        self._changing_names = tuple(self._names[id(parameter)] for parameter in self._changing)

    def _changed(self) -> list[Tensor]:
        marks = zip(self._parameters, self._versions)
        by_version = [parameter for parameter, version in marks if parameter._version != version]
        known = {id(parameter) for parameter in by_version}
        return [*by_version, *(parameter for parameter in self._changed_by_value() if id(parameter) not in known)]

    def _changed_by_value(self) -> list[Tensor]:
        sums = zip(self._summed, self._sums, checksums(self._summed))
        return [parameter for parameter, before, now in sums if differ(before, now)]


class BufferStash:
    """Copies of a module's buffers: small ones made before every attempt, large ones when they have changed.

    Small ones are copied beside themselves, in one call: BatchNorm changes its statistics without
    raising their version, and so does all that writes to ``buffer.data``. A step may also put new
    tensors in the place of its buffers: then the old ones come back.

    Args:
        module: The module whose buffers may change in a step.
    """

    def __init__(self, module: Module) -> None:
        self._owners = [(name, part._buffers) for name, part in module.named_modules()]
        self._kept: list[dict[str, Tensor | None]] = []
        self._small: list[Tensor] = []
        self._large: list[_Large] = []
        self._uncopied: list[tuple[str, Tensor]] = []
        self._versions: list[int] = []
        self._watch()

    def tensors(self) -> Iterator[Tensor]:
        """The copies that lie where the buffers do."""
        yield from self._copies
        yield from (large.copy for large in self._large)

    def keep(self) -> None:
        """Copy what may have changed since the last time."""
        if any(
            owner.keys() != kept.keys() or any(owner[name] is not kept[name] for name in kept)
            for (_, owner), kept in zip(self._owners, self._kept)
            if owner or kept
        ):
            self._watch()
        _copy_all(self._copies, self._small)
        for large in self._large:
            large.keep()
        self._versions = [buffer._version for _, buffer in self._uncopied]

    def learn(self) -> None:
        """An attempt went through."""
        for large in self._large:
            large.learn()

    def put_back(self) -> None:
        """Write the copies back."""
        for (_, owner), kept in zip(self._owners, self._kept):
            owner.clear()
            owner.update(kept)
        _copy_all(self._small, self._copies)
        for large in self._large:
            large.put_back()

    def lost(self) -> str | None:
        """A buffer that has changed and of which there is no copy, in words."""
        for (name, buffer), version in zip(self._uncopied, self._versions):
            if buffer._version != version:
                return f"a buffer that is not dense in place ({name})"
        return next((f"a buffer by its .data ({large.name})" for large in self._large if large.is_lost()), None)

    def _watch(self) -> None:
        """See which tensors are the buffers now."""
        self._kept = [dict(owner) for _, owner in self._owners]
        every: dict[int, tuple[str, Tensor]] = {}
        for path, owner in self._owners:
            for name, buffer in owner.items():
                if buffer is not None and not buffer.is_meta:
                    every[id(buffer)] = (f"{path}.{name}".lstrip("."), buffer)
        self._uncopied = [named for named in every.values() if not is_writable(named[1])]
        every = {key: named for key, named in every.items() if is_writable(named[1])}
        known = {id(large.buffer): large for large in self._large}
        self._small = [buffer for _, buffer in every.values() if buffer.numel() * buffer.element_size() <= SMALL]
        self._copies = [torch.empty_like(buffer) for buffer in self._small]
        small = {id(buffer) for buffer in self._small}
        self._large = [known.get(key) or _Large(*named) for key, named in every.items() if key not in small]


class _Large:
    """A buffer and a copy of it, on the host until it has changed.

    Its version tells of most changes, and the first attempt that goes through shows whether it changes
    without one: then it is copied every time.
    """

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name, self.buffer = name, buffer
        self.copy = buffer.detach().to("cpu", copy=True)
        self._version = buffer._version
        self._changes: bool | None = None  # without raising its version; ``None`` before that is known

    @torch.no_grad()
    def keep(self) -> None:
        changed = self._changes is not False or self.buffer._version != self._version
        if changed and (self._changes is None or self.copy.device == self.buffer.device):
            self.copy.copy_(self.buffer)
        elif changed:
            self.copy = self.buffer.detach().clone()
        self._version = self.buffer._version

    def learn(self) -> None:
        if self._changes is None:
            self._changes = self.buffer._version == self._version and not self._is_as_kept()

    @torch.no_grad()
    def put_back(self) -> None:
        if self._changes is not False or self.buffer._version != self._version:
            self.buffer.copy_(self.copy)
            self._version = self.buffer._version

    def is_lost(self) -> bool:
        return self._changes is False and not self._is_as_kept()

    def _is_as_kept(self) -> bool:
        return torch.equal(self.buffer.to(self.copy.device), self.copy)


@torch.no_grad()
def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources):  # a GPU copies tensors of one kind in one go
        pairs = kinds.setdefault(target.dtype, ([], []))
        pairs[0].append(target)
        pairs[1].append(source)
    for into, out_of in kinds.values():
        torch._foreach_copy_(into, out_of)


class AttributeStash:
    """Attributes of a module's parts that are no tables of tensors: modes, tensors, what steps gather, generators.

    A large tensor, or one with a graph, is most often an output of the step before: it is not kept
    alive. Nor is each element of a long list copied: what a step appends goes, and a change of an
    element in place is noticed. Numbers, and lists of them, are none of this: what counts attempts goes on counting.

    Args:
        module: The module whose attributes a step may change.
    """

    def __init__(self, module: Module) -> None:
        parts = [(path, part) for path, part in module.named_modules() if not isinstance(part, Metric)]
        self._parts = [part for _, part in parts]
        # PyTorch's own layers keep nothing else, and they are many.
        self._owners = [(path, vars(part)) for path, part in parts if not type(part).__module__.startswith("torch.nn.")]
        self._modes: list[bool] = []
        self._names: list[set[str]] = []
        self._kept: list[tuple[dict[str, Any], str, Any]] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._watched: list[tuple[str, Tensor, int]] = []
        self._containers: list[_Contents] = []
        self._tails: list[tuple[dict[str, Any], str, int, int]] = []  # of lists that are not kept alive
        self._generators: list[tuple[Any, Any]] = []
        self.keep()

    def tensors(self) -> Iterator[Tensor]:
        """The copies that lie where the attributes do."""
        yield from self._copies

    def keep(self) -> None:
        """Remember what there is, before an attempt."""
        before = self._copied
        self._modes = [part.training for part in self._parts]
        self._kept, self._copied, self._watched, self._generators = [], [], [], []
        self._containers, self._tails = [], []
        self._names = [set(owner) for _, owner in self._owners]
        for path, owner in self._owners:
            for name, value in owner.items():
                if _is_kept(type(value)) and name not in _TABLES:  # type: ignore[arg-type]
                    self._note(path, owner, name, value)
        if len(self._copied) != len(before) or any(new is not old for new, old in zip(self._copied, before)):
            self._copies = []  # the old ones go first
            self._copies = [torch.empty_like(tensor) for tensor in self._copied]
        _copy_all(self._copies, self._copied)

    def put_back(self) -> None:
        """Give attributes their values back, and containers their contents."""
        for part, mode in zip(self._parts, self._modes):
            if part.training != mode:
                part.training = mode
        for (_, owner), names in zip(self._owners, self._names):
            for name in [name for name, value in owner.items() if name not in names and _is_gathered(value)]:
                del owner[name]
        for owner, name, value in self._kept:
            owner[name] = value
        _copy_all(self._copied, self._copies)
        for contents in self._containers:
            contents.put_back()
        for owner, name, key, length in self._tails:
            if id(owner.get(name)) == key:
                del owner[name][length:]
        for generator, state in self._generators:
            restore_generator(generator, state)

    def lost(self) -> str | None:
        """A tensor that has changed in place and of which there is no copy, in words."""
        changed = (place for place, tensor, version in self._watched if tensor._version != version)
        return next((f"a tensor in place that is no buffer ({place})" for place in changed), None)

    def draws_numbers(self) -> bool:
        """Whether a generator among them has drawn since."""
        return have_moved(self._generators)

    def _note(self, path: str, owner: dict[str, Any], name: str, value: Any) -> None:
        place = f"{path}.{name}".lstrip(".")
        if isinstance(value, Tensor):
            if _is_small_state(value):
                self._kept.append((owner, name, value))
                self._watch(place, value)
        elif isinstance(value, (list, deque, dict)):
            if _is_gathered(value) and _is_light(value):
                self._kept.append((owner, name, value))
                self._gather(place, value)
            elif _is_gathered(value) and isinstance(value, list):
                self._tails.append((owner, name, id(value), len(value)))
        else:
            self._generators.append((value, generator_state(value)))

    def _gather(self, place: str, container: Any) -> None:
        """What a container of tensors or of other containers holds, at any depth of dictionaries and short lists."""
        self._containers.append(_Contents(container))
        if _holds_tensors(container):
            for tensor in _things(container):
                self._watch(place, tensor, copies=len(container) <= FEW)
            return
        for thing in _things(container) if len(container) <= FEW else ():
            if isinstance(thing, (list, deque, dict)) and _is_gathered(thing):
                self._gather(place, thing)

    def _watch(self, place: str, tensor: Tensor, *, copies: bool = True) -> None:
        if copies and not tensor.is_meta and is_writable(tensor):
            self._copied.append(tensor)
        else:
            self._watched.append((place, tensor, tensor._version))


class _Contents:
    """What a container holds: all of it, or of a long list how much it is, as steps append to such."""

    def __init__(self, container: Any) -> None:
        self._container = container
        long = isinstance(container, list) and len(container) > FEW
        self._kept: Any = len(container) if long else copy.copy(container)

    def put_back(self) -> None:
        """Give the container its contents back, unless it has come to hold numbers."""
        if not _is_gathered(self._container):
            return
        if isinstance(self._kept, int):
            del self._container[self._kept :]
        else:
            _refill(self._container, self._kept)


@cache
def _is_kept(kind: type) -> bool:
    return issubclass(kind, (Tensor, list, deque, dict, *GENERATORS))


# What nn.Module keeps of itself: its mode, and tables of tensors, children and hooks.
_TABLES = vars(Module()).keys()


def _things(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _holds_tensors(container: Any) -> bool:
    """Whether it holds tensors and nothing else; so does an empty one."""
    return all(isinstance(thing, Tensor) for thing in _things(container))


def _is_gathered(value: Any) -> bool:
    """Whether a value is a tensor, or a container of what steps gather: tensors, arrays, and records of anything."""
    if isinstance(value, (list, deque, dict)):
        return all(isinstance(thing, (Tensor, np.ndarray, list, tuple, dict)) for thing in _things(value))
    return isinstance(value, Tensor)


def _is_light(container: Any) -> bool:
    """Whether it may be kept alive: it holds no large tensor, and none with a graph; long lists are not searched."""
    if isinstance(container, Tensor):
        return _is_small_state(container)
    if not isinstance(container, (list, deque, dict, tuple)):
        return True
    return all(map(_is_light, list(_things(container))[-FEW:]))


def _is_small_state(tensor: Tensor) -> bool:
    small = tensor.numel() * tensor.element_size() <= SMALL
    return small and tensor.grad_fn is None and not tensor.is_inference()


def _refill(container: Any, contents: Any) -> None:
    """Put contents back into the container that they were copied from."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)
