"""Measure whether submodules may run over a batch in chunks, and find those that may."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ga.batch.pytree import tensors_in
from lightning_ga.compat.patching import replaced, shadowed
from lightning_ga.errors import UserError
from lightning_ga.fit.chunks import ChunkedModules, Chunks, extent
from lightning_ga.fit.exactness.check import batch_norm_layers
from lightning_ga.fit.exactness.differences import distance, norm
from lightning_ga.fit.exactness.halves import SampleBatch
from lightning_ga.fit.exactness.passes import Passes, PassRunner, numbers_of, state_sums
from lightning_ga.memory.oom import is_out_of_memory
from lightning_ga.plan.chunk_size import ChunkSize, Seen
from lightning_ga.plan.exactness import NO_GRADIENT, PER_CHUNK, RANDOM_CHUNKS, Exactness, unmeasured
from lightning_ga.snapshot.checksums import differ

MOST = 32  # submodules that are tried


@dataclass(frozen=True, slots=True)
class Independent:
    """Submodules that treat samples by themselves."""

    names: tuple[str, ...] = ()
    bytes_per_sample: int = 0  # of their outputs, which a loss on the whole batch needs


def _fixed_statistics() -> AbstractContextManager[None]:
    """Return a context in which BatchNorm normalizes by its running statistics, so that samples do not meet in it.

    No ``TorchFunctionMode``, which is off in a backward pass, where chunks are computed again.
    """
    normalize = nn.functional.batch_norm

    def fixed(values: Tensor, mean: Tensor | None, variance: Tensor | None, *rest: Any, **settings: Any) -> Tensor:
        if mean is not None:
            rest, settings = rest[:2], {**settings, "training": False}
        return normalize(values, mean, variance, *rest, **settings)

    return replaced(nn.functional, batch_norm=fixed)


def judge_chunks(passes: PassRunner, chunked: ChunkedModules, batch: SampleBatch, tolerance: float) -> Exactness:
    """Compare a pass over a batch whose submodules run in two chunks with one in which they run whole.

    Raises:
        UserError: If a submodule does not treat samples by themselves, but for BatchNorm.
    """
    size, run = chunked.size, _Runner(passes, batch)
    size.window, size.seen = batch.size, Seen()
    try:
        whole, seen, kept = run(0), size.seen, _state_of(chunked)
        if missing := [name for name in chunked.names if name not in seen.calls]:
            raise _never_called(chunked, missing[0])
        if not 0 < norm(whole.gradients[0]) < float("inf"):
            return unmeasured(tolerance, NO_GRADIENT)
        size.samples, size.seen = (batch.size + 1) // 2, None
        error = distance(whole.gradients[0], run(0).gradients[0])
        if changed := [name for name, value in _state_of(chunked).items() if differ(kept.get(name), value)]:
            raise _changes(chunked, changed[0])
        if error <= tolerance:
            return Exactness(error, tolerance, "exact", micro_steps=passes.steps)
        layers = tuple(layer for module in chunked.modules for layer in batch_norm_layers(module))
        if seen.draws and layers:
            return Exactness(None, tolerance, "batch_norm", layers, PER_CHUNK, passes.steps)
        if seen.draws:
            return Exactness(None, tolerance, "random", reason=RANDOM_CHUNKS, micro_steps=passes.steps)
        with _fixed_statistics():
            size.samples = None
            whole = run(0)
            size.samples = (batch.size + 1) // 2
            if not distance(whole.gradients[0], run(0).gradients[0]) <= tolerance:
                raise _mixes_samples(chunked, error)
        return Exactness(error, tolerance, "batch_norm", layers, PER_CHUNK, passes.steps)
    finally:
        size.samples = size.window = size.seen = None


def _state_of(chunked: ChunkedModules) -> dict[str, Any]:
    """Return what the submodules keep: numbers, and sums over tensors."""
    pairs = list(zip(chunked.names, chunked.modules))
    kept = [{**numbers_of(module), **state_sums(module)} for _, module in pairs]
    return {f"{name}.{key}": value for (name, _), state in zip(pairs, kept) for key, value in state.items()}


def _never_called(chunked: ChunkedModules, name: str) -> UserError:
    return UserError(
        f"whole={chunked.names!r}: training_step never calls {name} (perhaps a method of it, such as "
        "forward_features): name submodules that are called."
    )


def _changes(chunked: ChunkedModules, name: str) -> UserError:
    return UserError(
        f"whole={chunked.names!r}: {name} changes in the forward pass, which runs for each chunk, and once more in the "
        "backward pass: change it outside, as in on_train_batch_end, or leave this submodule out."
    )


def _mixes_samples(chunked: ChunkedModules, error: float) -> UserError:
    names = ", ".join(chunked.names)
    return UserError(
        f"whole={chunked.names!r}: run in chunks, {names} made a gradient that is off by {error:.1g} of it, so what "
        "it computes of a sample depends on the others: name submodules that treat samples by themselves (the encoder "
        'below the loss), or let whole="auto" find them.'
    )


class Submodules:
    """The trained submodules of a model, of which each can be let run in chunks; made before passes without a trace."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._chunked = {
            part: _Noted(part, ChunkSize())
            for _, part in module.named_modules()
            if part is not module and any(p.requires_grad for p in part.parameters())
        }

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context in which their forward passes are seen."""
        with ExitStack() as stack:
            for part, chunks in self._chunked.items():
                stack.enter_context(shadowed(part, "forward", chunks))
            yield

    def independent(self, passes: PassRunner, batch: SampleBatch, tolerance: float) -> Independent:
        """Find the largest submodules whose outputs lead with the sample axis and that treat samples by themselves."""
        run, chunked = _Runner(passes, batch), self._chunked
        with _fixed_statistics():
            whole = run(0).gradients[0]
            noted = {part: chunks.bytes for part, chunks in chunked.items()}
            candidates = [part for part in chunked if noted[part]][:MOST] if 0 < norm(whole) < float("inf") else []

            def treats_samples_alone(part: nn.Module) -> bool:
                size = chunked[part].size
                size.samples, size.window = (batch.size + 1) // 2, batch.size
                try:
                    return distance(whole, run(0).gradients[0]) <= tolerance
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    return False
                finally:
                    size.samples = None

            found = dict(
                self._largest(self._module, "", lambda part: part in candidates and treats_samples_alone(part))
            )
        return Independent(tuple(found), sum(noted[part] or 0 for part in found.values()) // batch.size)

    def _largest(
        self, parent: nn.Module, prefix: str, fits: Callable[[nn.Module], bool]
    ) -> Iterator[tuple[str, nn.Module]]:
        for name, child in parent.named_children():
            if child in self._chunked and fits(child):
                yield f"{prefix}{name}", child
            else:
                yield from self._largest(child, f"{prefix}{name}.", fits)


class _Noted(Chunks):
    """The forward pass of a module, of which it is seen whether outputs lead with the axis of inputs."""

    bytes: int | None = None  # of its outputs so far; 0 if one of them does not

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        output = super().__call__(*arguments, **named)
        outputs, entries = list(tensors_in(output)), extent((arguments, named), 0)
        leads = entries is not None and entries > 1 and all(t.dim() and len(t) == entries for t in outputs)
        leads &= any(tensor.requires_grad for tensor in outputs) and self.bytes != 0
        self.bytes = (self.bytes or 0) + sum(tensor.nbytes for tensor in outputs) if leads else 0
        return output


class _Runner:
    """Runs the step on a batch without a trace."""

    def __init__(self, passes: PassRunner, batch: SampleBatch) -> None:
        self._passes, self._batch = passes, batch.collated

    def __call__(self, seed: int) -> Passes:
        return self._passes.run([self._batch], seed=seed)
