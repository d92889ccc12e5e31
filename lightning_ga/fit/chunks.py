"""Run a module over a batch in chunks that are recomputed in the backward pass: exact for any loss on its outputs.

A loss that compares samples (contrastive ones, Barlow Twins) needs the outputs of the whole batch, but an encoder does
not: it treats samples independently. So the encoder runs chunk by chunk under activation checkpointing, and the loss
sees all outputs at once (the scheme of GradCache, arXiv 2101.06983, without a loss of its own). The memory is that of
one chunk, of all outputs and of the loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_ga.batch.pytree import open_container, rebuild, same_values, take
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count, split_evenly
from lightning_ga.snapshot.copies import versions


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
        chunk: The most samples of a chunk (or tokens, with ``dim=1``). Chunks differ by one sample at most.
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
    with shadowed(module, "forward", _Chunks(module, require_count("chunk", chunk), dim, keep)):
        yield


class _Chunks:
    """The forward pass of a module, in chunks."""

    def __init__(self, module: Module, size: int, dim: int, keep: int) -> None:
        self._module, self._whole, self._name = module, module.forward, type(module).__name__
        self._size, self._dim, self._keep = size, dim, keep

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it."""
        samples = self._extent((arguments, named))
        if samples is None:
            raise UserError(
                f"{self._name} is to run in chunks along axis {self._dim}, and got no tensor with that axis: name a "
                "module that gets the batch."
            )
        if samples <= self._size:
            return self._whole(*arguments, **named)
        sizes = split_evenly(samples, -(-samples // self._size))
        kept = range(len(sizes) - self._keep, len(sizes))
        outputs, start = [], 0
        for number, size in enumerate(sizes):
            given, also = self._cut((arguments, named), samples, start, start + size)
            recomputes = torch.is_grad_enabled() and number not in kept
            with _unchanged_buffers(self._module):
                outputs.append(self._checkpointed(given, also) if recomputes else self._whole(*given, **also))
            start += size
        return self._joined(outputs, sizes)

    def _checkpointed(self, arguments: Any, named: Any) -> Any:
        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _statistics_off(self._module)

        return checkpoint(self._whole, *arguments, use_reentrant=False, context_fn=contexts, **named)

    def _extent(self, node: Any) -> int | None:
        """Return the length of the first tensor that has the axis."""
        if isinstance(node, Tensor):
            return node.shape[self._dim] if -node.dim() <= self._dim < node.dim() else None
        found = (self._extent(child) for _, child in open_container(node) or ())
        return next((length for length in found if length is not None), None)

    def _cut(self, node: Any, samples: int, start: int, stop: int) -> Any:
        """Return what a value holds for the samples from ``start`` to ``stop``."""
        if isinstance(node, Tensor):
            return take(node, self._dim % node.dim(), start, stop) if self._extent(node) == samples else node
        children = open_container(node)
        if children is None:
            return node
        return rebuild(node, [self._cut(child, samples, start, stop) for _, child in children])

    def _joined(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Join the outputs of the chunks."""
        first = outputs[0]
        if all(isinstance(output, Tensor) and self._extent(output) == size for output, size in zip(outputs, sizes)):
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
    changed = [name for name, was, now in zip(buffers, before, versions(buffers.values())) if was != now]
    if changed:
        raise UserError(
            f"{type(module).__name__} changes its buffer {changed[0]} in its forward pass, which runs twice for each "
            "chunk: change it outside, or leave the module out of those that run in chunks."
        )
