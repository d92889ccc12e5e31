"""Run a module over a batch in chunks that are recomputed in the backward pass: exact for any loss on its outputs.

A loss that compares samples (contrastive ones, Barlow Twins) needs the outputs of the whole batch, but an encoder does
not: it treats samples independently. So the encoder runs chunk by chunk under activation checkpointing, and the loss
sees all outputs at once (the scheme of GradCache, arXiv 2101.06983, without a loss of its own). The memory is that of
one chunk, of all outputs and of the loss.
"""

from collections.abc import Callable, Iterator, Sequence
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
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.chunk_size import ChunkSize
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
            depth of lists, tuples, dictionaries and dataclasses; all else is passed on whole.
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
    with shadowed(module, "forward", Chunks(module, ChunkSize(require_count("chunk", chunk), keep), dim)):
        yield


class ChunkedModules:
    """Submodules of a training that run over its batches in chunks; in evaluation they run whole."""

    def __init__(self, trainer: Any, names: Sequence[str]) -> None:
        root, self.size, self._trainer = trainer.lightning_module, ChunkSize(step_calls=_UNKNOWN), trainer
        found = {id(module): (name, module) for name in names for module in [_submodule(root, name)]}
        self.names = tuple(name for name, _ in found.values())
        self.modules = [module for _, module in found.values()]
        for name, module in found.values():
            inside = next((n for n, other in found.values() if other is not module and other in module.modules()), None)
            if inside is not None:
                raise UserError(f"whole={self.names!r}: {inside} lies inside {name}, which runs in chunks with it.")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which their forward passes run in chunks as large as ``size`` says."""
        with ExitStack() as stack:
            for name, module in zip(self.names, self.modules):
                chunks, whole = Chunks(module, self.size, name=name), module.forward
                stack.enter_context(shadowed(module, "forward", self._while_training(chunks, whole)))
            yield

    def _while_training(self, chunks: "Chunks", whole: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (chunks if self._trainer.training else whole)(*given, **named)


def _submodule(module: Module, name: str) -> Module:
    found: Module | None = dict(module.named_modules(remove_duplicate=False)).get(name)
    if found is None or not name:
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        raise UserError(f"whole= names {name!r}, and {type(module).__name__} has no such submodule: it has {children}.")
    return found


class Chunks:
    """The forward pass of a module, in chunks."""

    def __init__(self, module: Module, size: ChunkSize, dim: int = 0, name: str = "") -> None:
        self._module, self._whole, self._name = module, module.forward, name or type(module).__name__
        self.size, self._dim = size, dim
        self._constant: set[str] = set()  # places of arguments that were seen to belong to no sample

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it."""
        if self.size.samples is None:
            return self._whole(*arguments, **named) if self.size.seen is None else self._watched(arguments, named)
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
            tensors = list(tensors_in((given, also)))
            before = versions(tensors)
            with _unchanged_buffers(self._module):
                outputs.append(self._checkpointed(given, also) if recomputes else self._whole(*given, **also))
            if recomputes and versions(tensors) != before:
                raise UserError(
                    f"{self._name} changes its input in place, and runs in chunks that are computed again from it: let "
                    "it change a copy, or leave it out of those that run in chunks."
                )
            start += size
        return self._joined(outputs, sizes)

    def _watched(self, arguments: Any, named: Any) -> Any:
        """Run it whole, and note what is seen of it."""
        assert self.size.seen is not None, "somebody wants to know"
        samples, before = extent((arguments, named), self._dim), RandomState(generators_of(self._module))
        output = self._whole(*arguments, **named)
        self.size.seen.calls.add(self._name)
        self.size.seen.draws |= not before.is_current()
        self._constant |= {
            place for place, tensor in _places("", (arguments, named)) if extent(tensor, self._dim) != samples
        }
        return output

    def _checkpointed(self, arguments: Any, named: Any) -> Any:
        generators = generators_of(self._module)
        before = RandomState(generators)

        @contextmanager
        def again() -> Iterator[None]:
            """Draw the same numbers, of NumPy and Python too, and update no statistics."""
            self.size.recomputes()
            now = RandomState(generators)
            before.restore()
            try:
                with _statistics_off(self._module):
                    yield
            finally:
                now.restore()

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _Repeatedly(again)

        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return run(self._whole, *arguments, **named)

    def _cut(self, node: Any, samples: int, start: int, stop: int, place: str = "") -> Any:
        """Return what a value holds for the samples from ``start`` to ``stop``."""
        if isinstance(node, Tensor):
            is_cut = extent(node, self._dim) == samples and place not in self._constant
            return (
                take(node, self._dim % node.dim(), start, stop) if is_cut and not isinstance(node, Parameter) else node
            )
        children = open_container(node)
        if children is None:
            return node
        if type(node) is list and len(node) == samples and next(tensors_in(node), None) is None:
            return node[start:stop]  # texts, say
        return rebuild(node, [self._cut(child, samples, start, stop, place + name) for name, child in children])

    def _joined(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Join the outputs of the chunks."""
        first = outputs[0]
        pairs = zip(outputs, sizes)
        if all(isinstance(output, Tensor) and extent(output, self._dim) == size for output, size in pairs):
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


class _Repeatedly:
    """A context that can be entered again, as a second backward pass does."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._entered = make, ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._make())

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _places(place: str, node: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value with their places."""
    if isinstance(node, Tensor):
        yield place, node
    for name, child in open_container(node) or ():
        yield from _places(place + name, child)


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


@contextmanager
def _unchanged_buffers(module: Module) -> Iterator[None]:
    """Return a context after which a buffer that a forward pass has changed is refused: it would change twice."""
    norms = {id(buffer) for part in module.modules() if isinstance(part, _NormBase) for buffer in part.buffers(False)}
    buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in norms}
    before = versions(buffers.values())
    yield
    after = dict(module.named_buffers())
    changed = [name for name, was, now in zip(buffers, before, versions(buffers.values())) if was != now]
    changed += [name for name, buffer in buffers.items() if after.get(name) is not buffer]
    if changed:
        raise UserError(
            f"{type(module).__name__} changes its buffer {changed[0]} in its forward pass, which runs twice for each "
            "chunk: change it outside, or leave the module out of those that run in chunks."
        )
