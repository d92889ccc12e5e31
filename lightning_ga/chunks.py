"""Run a module over a batch in chunks that are recomputed in the backward pass: exact for any loss on its outputs.

A loss that compares samples (contrastive ones, Barlow Twins) needs the outputs of the whole batch; the encoder below
treats samples independently. So it runs chunk by chunk under activation checkpointing, and the loss sees all outputs at
once (the scheme of GradCache, arXiv 2101.06983). The memory is that of one chunk, of all outputs and of the loss.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, RNNBase
from torch.nn.utils.rnn import PackedSequence

from lightning_ga.batch.pytree import extents, open_container, rebuild, same_values, tensors_in, walk
from lightning_ga.batch.take import take
from lightning_ga.compat.patching import shadowed
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import micro_batch_sizes, require_count
from lightning_ga.recompute.wrapper import RunTwice, submodules
from lightning_ga.snapshot.random_numbers import RandomState, generators_of


@dataclass(slots=True)
class ChunkSize:
    """How large the chunks of forward passes are from here on."""

    samples: int | None = None  # ``None`` to run whole batches
    window: int | None = None  # samples of the step's batch, if known; a module may get several views of each

    def use(self, samples: int | None, *, window: int) -> None:
        """Run the next batches, of ``window`` samples each, in chunks of at most so many samples; whole if ``None``."""
        self.samples = samples
        self.window = window

    def sizes(self, entries: int) -> tuple[int, ...]:
        """Return the sizes of the chunks of so many entries: the fewest near-equal ones."""
        if not entries:
            return (0,)
        views = max(1, entries // (self.window or entries))
        return micro_batch_sizes(entries, min(entries, (self.samples or entries) * views))


def in_chunks(module: Module, *, chunk: int, dim: int = 0) -> AbstractContextManager[None]:
    """Run a module's forward pass over its batch in chunks, each recomputed in the backward pass.

    The gradient is that of the whole batch, whatever the loss does with the outputs; the module itself has to treat
    samples independently. Random numbers are drawn again as they were, and BatchNorm sees one chunk at a time and
    updates its statistics once for each. This is valid for all calls within the context; there may be several.

    Args:
        module: The module. Tensors among its arguments that are as long along ``dim`` as the first one are cut, at any
            depth of lists, tuples, dictionaries and dataclasses, and lists without tensors (texts) and packed sequences
            that are as long; all else, and each parameter, is passed on whole. Its outputs have their samples along
            ``dim``.
        chunk: The most samples of a chunk (or tokens, with ``dim=1``).
        dim: The axis along which inputs are cut and outputs are joined.

    Raises:
        UserError: If an output has no entry for each sample, or if a forward pass changes its arguments or a parameter.

    Examples:
        Contrastive learning in a plain loop, with the memory of 64 samples::

            with lightning_ga.in_chunks(model.encoder, chunk=64):
                loss = contrastive_loss(model.encoder(one), model.encoder(other))
            loss.backward()
    """
    return shadowed(module, "forward", Chunks(module, ChunkSize(require_count("chunk", chunk)), dim))


class ChunkedModules:
    """Submodules of a training that run over its batches in chunks; in evaluation they run whole."""

    def __init__(self, trainer: Any, names: Sequence[str]) -> None:
        self.size = ChunkSize()
        self.forwards = {
            name: Chunks(module, self.size, name=name, trainer=trainer)
            for name, module in submodules(trainer.lightning_module, names, "whole=").items()
        }
        self.names = tuple(self.forwards)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which their forward passes run in chunks as large as ``size`` says."""
        with ExitStack() as stack:
            for chunks in self.forwards.values():
                stack.enter_context(shadowed(chunks.module, "forward", chunks))
            yield


class Chunks:
    """The forward pass of a module, in chunks; a pass without chunks notes which arguments belong to no sample."""

    def __init__(self, module: Module, size: ChunkSize, dim: int = 0, *, name: str = "", trainer: Any = None) -> None:
        self.module = module
        self._forward = module.forward
        self._name = name or type(module).__name__
        self.size = size
        self._dim = dim
        self._trainer = trainer
        self._run_twice = RunTwice(module, self._name, self._forward)
        self.is_called = False  # whether it ran whole
        self.draws = False  # whether it has drawn random numbers
        self._constant: set[str] = set()  # places of arguments that were seen to belong to no sample

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it."""
        size = self.size
        if self._trainer is not None and not self._trainer.training:  # evaluation runs whole batches
            return self._forward(*arguments, **named)
        given = (arguments, named)
        samples = _length(given, self._dim)
        if size.samples is None:
            return self._run_whole(given, samples)
        if samples is None:
            raise self._error(f"got no tensor with axis {self._dim}", "name a module that gets the batch")
        sizes = size.sizes(samples)
        if len(sizes) == 1 and size.samples >= (size.window or 0):  # a step may call a module several times
            return self._forward(*arguments, **named)
        if isinstance(self.module, RNNBase) and self._dim % 3 != 1:
            remedy = f"name a module around it whose outputs have their samples along axis {self._dim}"
            raise self._error("returns hidden states, whose samples lie along axis 1", remedy)
        outputs = []
        start = 0
        for of in sizes:
            some, some_named = self._cut(given, samples, start, start + of)
            outputs.append(self._run_twice(*some, **some_named))
            start += of
        return self._joined(outputs, sizes)

    def _run_whole(self, given: Any, samples: int | None) -> Any:
        """Run without chunks, and note which arguments belong to no sample and whether random numbers are drawn."""

        def note(place: str, node: Any) -> None:
            if _length(node, self._dim) != samples:
                self._constant.add(place)

        before = RandomState(generators_of(self.module))
        _mapped(given, note)
        output = self._forward(*given[0], **given[1])
        self.is_called = True
        self.draws = self.draws or not before.is_current()
        return output

    def _cut(self, given: Any, samples: int, start: int, stop: int) -> Any:
        """Return the arguments of the samples from ``start`` to ``stop``."""

        def cut(place: str, node: Any) -> Any:
            if place in self._constant or _length(node, self._dim) != samples:
                return node
            return take(node, self._dim % getattr(node, "ndim", 1), start, stop)

        return _mapped(given, cut)

    def _joined(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Join the outputs of the chunks."""
        first = outputs[0]
        # Its own tensors are of no sample.
        is_own = any(first is each for each in (*self.module.parameters(), *self.module.buffers()))
        are_tensors = all(isinstance(each, Tensor) for each in outputs)
        lengths = [_length(each, self._dim) for each in outputs]
        if are_tensors and lengths == [*sizes] and not is_own:
            try:
                return torch.cat(list(outputs), self._dim)
            except RuntimeError as error:
                remedy = "pad them to the longest of the batch, which an argument can say, or reduce them inside"
                raise self._error(f"returned tensors that cannot be joined ({error})", remedy) from error
        children = open_container(first)
        if children and all(type(output) is type(first) for output in outputs):
            fields = zip(*([child for _, child in open_container(output) or ()] for output in outputs))
            return rebuild(first, [self._joined(field, sizes) for field in fields])
        if not isinstance(first, Tensor) and all(same_values(first, output) for output in outputs):
            return first
        shown = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else repr(first)[:80]
        why = f"returned {shown} for a chunk of {sizes[0]}, which has no entry for each sample along axis {self._dim}"
        raise self._error(why, "return a value for each sample, and average outside of it")

    def _error(self, why: str, remedy: str) -> UserError:
        return UserError(f"{self._name} runs in chunks, and {why}: {remedy}.")


def _mapped(node: Any, visit: Callable[[str, Any], Any], place: str = "") -> Any:
    """Return a value with ``visit(place, each)`` instead of its tensors and its lists of no tensors, such as texts."""
    if isinstance(node, (Tensor, PackedSequence)) or (type(node) is list and next(tensors_in(node), None) is None):
        return visit(place, node)
    children = open_container(node)
    if children is None:
        return node
    return rebuild(node, [_mapped(x, visit, place + name) for name, x in children])


def _length(node: Any, dim: int) -> int | None:
    """Return the length of the first value with samples that has an axis, or of a list of no tensors."""
    found = next((axes[dim] for _, axes in walk(node, _axes_of) if -len(axes) <= dim < len(axes)), None)
    return len(node) if found is None and type(node) is list else found


def _axes_of(node: Any) -> tuple[int, ...] | None:
    """Return the extents of a tensor or of packed sequences; none of a parameter, which belongs to no sample."""
    may_have_samples = isinstance(node, (Tensor, PackedSequence)) and not isinstance(node, Parameter)
    return extents(node) if may_have_samples else None
