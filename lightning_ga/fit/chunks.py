"""Run a module over a batch in chunks that are recomputed in the backward pass: exact for any loss on its outputs.

A loss that compares samples (contrastive ones, Barlow Twins) needs the outputs of the whole batch, but an encoder does
not: it treats samples independently. So the encoder runs chunk by chunk under activation checkpointing, and the loss
sees all outputs at once (the scheme of GradCache, arXiv 2101.06983, without a loss of its own). The memory is that of
one chunk, of all outputs and of the loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_ga.batch.pytree import open_container, rebuild, same_values, take, tensors_in
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import ChunkSize, require_count
from lightning_ga.snapshot.copies import versions
from lightning_ga.snapshot.random_numbers import RandomState, generators_of

_UNKNOWN = 2**31  # calls of a step: none of the first step's chunks is among the last


@contextmanager
def in_chunks(module: Module, *, chunk: int, dim: int = 0, keep: int = 0) -> Iterator[None]:
    """Run a module's forward pass over its batch in chunks, each recomputed in the backward pass.

    The gradient is that of the whole batch, whatever the loss does with the outputs; the module itself has to treat
    samples independently. Random numbers are drawn again as they were, and BatchNorm sees one chunk at a time and
    updates its statistics once for each. All of it holds for calls within the context, so that a module may be called
    several times.

    Args:
        module: The module. Tensors among its arguments that are as long along ``dim`` as the first one are cut, at any
            depth of lists, tuples, dictionaries and dataclasses, and lists without tensors (texts) that are as long;
            all else is passed on whole.
        chunk: The most samples of a chunk (or tokens, with ``dim=1``).
        dim: The axis along which inputs are cut and outputs are joined.
        keep: How many chunks of each call, the last ones, keep their activations instead: less time, more memory.

    Raises:
        UserError: If an output has no entry for each sample, or if a forward pass changes a buffer.

    Examples:
        Contrastive learning in a plain loop, with the memory of 64 samples::

            with lightning_ga.in_chunks(model.encoder, chunk=64):
                loss = contrastive_loss(model.encoder(one), model.encoder(other))
            loss.backward()
    """
    with installed([Chunks(module, ChunkSize(require_count("chunk", chunk), keep), dim)]):
        yield


class ChunkedModules:
    """Submodules of a training that run over its batches in chunks; in evaluation they run whole."""

    def __init__(self, trainer: Any, names: Sequence[str]) -> None:
        root, self.size = trainer.lightning_module, ChunkSize(step_calls=_UNKNOWN)
        found = {_submodule(root, name): name for name in names}
        self.forwards = {name: Chunks(module, self.size, name=name, trainer=trainer) for module, name in found.items()}
        self.names = tuple(self.forwards)
        for module, name in found.items():
            inside = next((n for other, n in found.items() if other is not module and other in module.modules()), None)
            if inside is not None:
                raise UserError(f"whole={self.names!r}: {inside} lies inside {name}, which runs in chunks with it.")

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which their forward passes run in chunks as large as ``size`` says."""
        return installed(self.forwards.values())


@contextmanager
def installed(forwards: Iterable["Chunks"]) -> Iterator[None]:
    """Return a context in which the forward passes of modules are these."""
    with ExitStack() as stack:
        for chunks in forwards:
            stack.enter_context(shadowed(chunks.module, "forward", chunks))
        yield


def _submodule(module: Module, name: str) -> Module:
    found: Module | None = dict(module.named_modules(remove_duplicate=False)).get(name)
    if found is None or not name:
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        raise UserError(f"whole= names {name!r}, and {type(module).__name__} has no such submodule: it has {children}.")
    return found


class Chunks:
    """The forward pass of a module, in chunks; if it runs whole, it is noted what a check wants to know."""

    def __init__(self, module: Module, size: ChunkSize, dim: int = 0, *, name: str = "", trainer: Any = None) -> None:
        self.module, self._whole, self._name = module, module.forward, name or type(module).__name__
        self.size, self._dim, self._trainer = size, dim, trainer
        self.draws = False  # whether it draws random numbers
        # Of its outputs, 0 if one of them does not lead with the axis of its input; ``None`` if it was not called.
        self.bytes: int | None = None
        self._constant: set[str] = set()  # places of arguments that were seen to belong to no sample

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it."""
        if self._trainer is not None and not self._trainer.training:  # evaluation runs whole batches
            return self._whole(*arguments, **named)
        if self.size.samples is None:
            return self._watched(arguments, named)
        samples = extent((arguments, named), self._dim)
        if samples is None:
            raise UserError(
                f"{self._name} is to run in chunks along axis {self._dim}, and got no tensor with that axis: name a "
                "module that gets the batch."
            )
        sizes = self.size.sizes(samples) if samples else [0]
        if len(sizes) == 1 and not self.size.recomputes_all:
            return self._whole(*arguments, **named)
        kept = self.size.kept(len(sizes)) if torch.is_grad_enabled() else ()
        outputs, start = [], 0
        for number, size in enumerate(sizes):
            given, also = self._cut((arguments, named), samples, start, start + size)
            recomputes = torch.is_grad_enabled() and number not in kept
            run = partial(checkpoint, self._whole, **self._recomputed()) if recomputes else self._whole
            with self._unchanged((given, also) if recomputes else ()):
                outputs.append(run(*given, **also))
            start += size
        return self._joined(outputs, sizes)

    def _watched(self, arguments: Any, named: Any) -> Any:
        """Run it whole, and note what is seen of it."""
        given = (arguments, named)
        samples, before = extent(given, self._dim), RandomState(generators_of(self.module))
        output = self._whole(*arguments, **named)
        self.draws |= not before.is_current()
        self._constant |= {place for place, each in _places(given) if _length(each, self._dim) != samples}
        outputs = [*tensors_in(output)]
        leads = samples is not None and samples > 1 and all(extent(each, self._dim) == samples for each in outputs)
        leads &= any(tensor.requires_grad for tensor in outputs) and self.bytes != 0
        self.bytes = (self.bytes or 0) + sum(tensor.nbytes for tensor in outputs) if leads else 0
        return output

    def _recomputed(self) -> dict[str, Any]:
        """Return how PyTorch computes a chunk again: numbers are drawn by ``_Again``, not by itself."""
        again = _Again(self.module, self.size)
        return {"use_reentrant": False, "preserve_rng_state": False, "context_fn": lambda: (nullcontext(), again)}

    @contextmanager
    def _unchanged(self, given: Any) -> Iterator[None]:
        """Return a context after which a buffer, or an input, that has changed is refused: it would change twice."""
        parts = (part for part in self.module.modules() if isinstance(part, _NormBase))
        norms = {id(buffer) for part in parts for buffer in part.buffers(False)}
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if id(buffer) not in norms}
        inputs = [*tensors_in(given)]
        before, of_inputs = versions(buffers.values()), versions(inputs)
        yield
        after = dict(self.module.named_buffers())
        changed = [name for name, was, now in zip(buffers, before, versions(buffers.values())) if was != now]
        changed += [name for name, buffer in buffers.items() if after.get(name) is not buffer]
        if changed:
            raise UserError(
                f"{type(self.module).__name__} changes its buffer {changed[0]} in its forward pass, which runs twice "
                "for each chunk: change it outside, or leave the module out of those that run in chunks."
            )
        if versions(inputs) != of_inputs:
            raise UserError(
                f"{self._name} changes its input in place, and runs in chunks that are computed again from it: let "
                "it change a copy, or leave it out of those that run in chunks."
            )

    def _cut(self, node: Any, samples: int, start: int, stop: int, place: str = "") -> Any:
        """Return what a value holds for the samples from ``start`` to ``stop``."""
        if isinstance(node, Tensor):
            is_shared = isinstance(node, Parameter) or place in self._constant or extent(node, self._dim) != samples
            return node if is_shared else take(node, self._dim % node.dim(), start, stop)
        children = open_container(node)
        if children is None:
            return node
        if _is_plain_list(node) and len(node) == samples and place not in self._constant:
            return node[start:stop]
        return rebuild(node, [self._cut(child, samples, start, stop, place + name) for name, child in children])

    def _require_alike(self, outputs: Sequence[Tensor]) -> None:
        """Refuse outputs that cannot be joined, such as those padded to the longest sample of their chunk."""
        shapes = [[*output.shape] for output in outputs]
        for shape in shapes:
            shape[self._dim] = 0
        other = next((output for output, shape in zip(outputs, shapes) if shape != shapes[0]), None)
        if other is not None:
            raise UserError(
                f"{self._name} runs in chunks, and returned tensors of shape {tuple(outputs[0].shape)} and "
                f"{tuple(other.shape)}, which cannot be joined: let its outputs have one shape whatever samples are in "
                "a chunk (pad them to the longest of the batch, which an argument can say), or reduce them inside."
            )

    def _joined(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Join the outputs of the chunks."""
        first = outputs[0]
        pairs = zip(outputs, sizes)
        if all(isinstance(output, Tensor) and extent(output, self._dim) == size for output, size in pairs):
            self._require_alike(outputs)
            return torch.cat(list(outputs), self._dim)
        children = open_container(first)
        if children and all(type(output) is type(first) for output in outputs):
            fields = zip(*([child for _, child in open_container(output) or ()] for output in outputs))
            return rebuild(first, [self._joined(field, sizes) for field in fields])
        if not isinstance(first, Tensor) and all(same_values(first, output) for output in outputs):
            return first
        shown = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else repr(first)[:80]
        raise UserError(
            f"{self._name} runs in chunks, and returned {shown} for a chunk of {sizes[0]}, which has no entry for each "
            f"sample along axis {self._dim}: return a value for each sample, and average outside of it."
        )


class _Again:
    """A context in which a chunk is computed again: it draws the same numbers, of NumPy and Python, too.

    Statistics are not updated again. A second backward pass enters the context once more.
    """

    def __init__(self, module: Module, size: ChunkSize) -> None:
        self._module, self._size = module, size
        self._generators = generators_of(module)
        self._before, self._entered = RandomState(self._generators), ExitStack()

    def __enter__(self) -> None:
        self._size.recomputes()
        self._entered.callback(RandomState(self._generators).restore)
        self._before.restore()
        self._entered.enter_context(_statistics_off(self._module))

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _places(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, and the lists without tensors, in a value with their places."""
    if isinstance(node, Tensor) or _is_plain_list(node):
        yield place, node
    for name, child in open_container(node) or ():
        yield from _places(child, place + name)


def _is_plain_list(node: Any) -> bool:
    """Return whether a value is a list of no tensors, such as texts, which may have one entry for each sample."""
    return type(node) is list and next(tensors_in(node), None) is None


def _length(node: Any, dim: int) -> int | None:
    """Return how many samples a tensor or a list would hold."""
    return extent(node, dim) if isinstance(node, Tensor) else len(node)


def extent(node: Any, dim: int) -> int | None:
    """Return the length of the first tensor that has an axis."""
    return next((each.shape[dim] for each in tensors_in(node) if -each.dim() <= dim < each.dim()), None)


@contextmanager
def _statistics_off(module: Module) -> Iterator[None]:
    """Return a context in which normalization updates no running statistics: the first run of a chunk has done so."""
    layers = [part for part in module.modules() if isinstance(part, _NormBase) and part.track_running_stats]
    momenta, counts = [layer.momentum for layer in layers], [layer.num_batches_tracked for layer in layers]
    before = [None if count is None else count.clone() for count in counts]
    try:
        for layer in layers:
            layer.momentum = 0.0  # the statistics stay saved for the backward pass, as in the first run
        yield
    finally:
        for layer, momentum, count, value in zip(layers, momenta, counts, before):
            layer.momentum = momentum
            if count is not None and value is not None:
                count.copy_(value)
