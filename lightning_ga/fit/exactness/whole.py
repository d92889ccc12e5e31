"""Measure whether submodules may run over a batch in chunks, and find those that may."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ga.compat.patching import replaced
from lightning_ga.errors import UserError
from lightning_ga.fit.chunks import ChunkedModules, Chunks, installed
from lightning_ga.fit.exactness.check import batch_norm_layers, is_users_error
from lightning_ga.fit.exactness.differences import Gradient, distance, norm
from lightning_ga.fit.exactness.halves import SampleBatch
from lightning_ga.fit.exactness.passes import PassRunner, changed_names, numbers_of, state_sums
from lightning_ga.memory.oom import attempt
from lightning_ga.plan.chunk_size import ChunkSize
from lightning_ga.plan.exactness import NO_GRADIENT, PER_CHUNK, RANDOM_CHUNKS, Exactness, unmeasured

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


def _gradient(passes: PassRunner, batch: SampleBatch, size: ChunkSize, *, whole: bool = False) -> Gradient:
    """Return the gradient of a pass in which the submodules of this size run in two chunks, or ``whole``."""
    with replaced(size, samples=None if whole else (batch.size + 1) // 2, window=batch.size):
        return passes.run(batch.whole).gradients[0]


def judge_chunks(passes: PassRunner, chunked: ChunkedModules, batch: SampleBatch, tolerance: float) -> Exactness:
    """Compare a pass over a batch whose submodules run in two chunks with one in which they run whole.

    Submodules that do not treat samples by themselves are refused, but for BatchNorm.
    """
    whole, before = _gradient(passes, batch, chunked.size, whole=True), _state_of(chunked)
    if missing := [name for name, chunks in chunked.forwards.items() if chunks.bytes is None]:
        raise _refused(
            chunked,
            f"training_step never calls {missing[0]} (perhaps a method of it, such as forward_features): name "
            "submodules that are called.",
        )
    if not 0 < norm(whole) < float("inf"):
        return unmeasured(tolerance, NO_GRADIENT)
    error = distance(whole, _gradient(passes, batch, chunked.size))
    if changed := changed_names(before, _state_of(chunked)):
        raise _refused(
            chunked,
            f"{changed[0]} changes in the forward pass, which runs for each chunk, and once more in the backward pass: "
            "change it outside, as in on_train_batch_end, or leave this submodule out.",
        )
    if error <= tolerance:
        return Exactness(error, tolerance, "exact", micro_steps=passes.steps)
    layers = tuple(layer for chunks in chunked.forwards.values() for layer in batch_norm_layers(chunks.module))
    if any(chunks.draws for chunks in chunked.forwards.values()):
        if layers:
            return Exactness(None, tolerance, "batch_norm", layers, PER_CHUNK, passes.steps)
        return Exactness(None, tolerance, "random", reason=RANDOM_CHUNKS, micro_steps=passes.steps)
    with _fixed_statistics():
        whole = _gradient(passes, batch, chunked.size, whole=True)
        if not distance(whole, _gradient(passes, batch, chunked.size)) <= tolerance:
            raise _refused(
                chunked,
                f"run in chunks, {', '.join(chunked.names)} made a gradient that is off by {error:.1g} of it, so what "
                "it computes of a sample depends on the others: name submodules that treat samples by themselves (the "
                'encoder below the loss), or let whole="auto" find them.',
            )
    return Exactness(error, tolerance, "batch_norm", layers, PER_CHUNK, passes.steps)


def _state_of(chunked: ChunkedModules) -> dict[str, Any]:
    """Return what the submodules keep: numbers, and sums over tensors."""
    kept = {name: {**numbers_of(each.module), **state_sums(each.module)} for name, each in chunked.forwards.items()}
    return {f"{name}.{key}": value for name, state in kept.items() for key, value in state.items()}


def _refused(chunked: ChunkedModules, reason: str) -> UserError:
    return UserError(f"whole={chunked.names!r}: {reason}")


class Submodules:
    """The trained submodules of a model, of which each can be let run in chunks; made before passes without a trace."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._chunked = {
            part: Chunks(part, ChunkSize())
            for part in module.modules()
            if part is not module and any(p.requires_grad for p in part.parameters())
        }

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which their forward passes are seen."""
        return installed(self._chunked.values())

    def independent(self, passes: PassRunner, batch: SampleBatch, tolerance: float) -> Independent:
        """Find the largest submodules whose outputs lead with the sample axis and that treat samples by themselves."""
        with _fixed_statistics():
            whole = _gradient(passes, batch, ChunkSize(), whole=True)
            if not 0 < norm(whole) < float("inf"):
                return Independent()
            bytes_of = {part: chunks.bytes for part, chunks in self._chunked.items() if chunks.bytes}
            candidates = list(bytes_of)[:MOST]

            def treats_samples_alone(part: nn.Module) -> bool:
                run = attempt(lambda: _gradient(passes, batch, self._chunked[part].size), is_users_error)
                return run.failure is None and distance(whole, run.result) <= tolerance

            found = dict(_largest(self._module, "", lambda part: part in candidates and treats_samples_alone(part)))
        return Independent(tuple(found), sum(bytes_of[part] for part in found.values()) // batch.size)


def _largest(parent: nn.Module, prefix: str, fits: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that fit, with their names, and none that lie inside of one."""
    for name, child in parent.named_children():
        if fits(child):
            yield f"{prefix}{name}", child
        else:
            yield from _largest(child, f"{prefix}{name}.", fits)
