"""Run micro-batches one after the other as training would, and keep their gradients and what they changed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ga.compat import gradient_dtype, trial_steps
from lightning_ga.compat.transfer import BatchTransfer
from lightning_ga.fit.deterministic import stop_dropping
from lightning_ga.fit.window_watch import kept_buffers
from lightning_ga.loading.samples import copied
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.snapshot.checksums import checksums, differ
from lightning_ga.snapshot.random_numbers import RandomState, generator_state, generators_of, have_moved, reseed

MOVED = 1e-2  # how far weights are moved, relatively: a teacher of momentum 0.9999 follows by more than rounding

Sums = dict[str, int | None]  # of the bits of tensors, by name


@dataclass(frozen=True, slots=True)
class Passes:
    """The results of micro-batches run one after the other."""

    gradients: list[list[torch.Tensor]]  # the gradient of each
    changed: tuple[str, ...]  # names of the state that they changed besides gradients
    changed_in_step: tuple[str, ...]  # those that ``training_step`` or the backward pass changed, and no hook
    draws: bool  # whether random numbers were drawn
    left: tuple[Sums, ...]  # the state after each micro-batch

    def leave(self, name: str) -> set[int | None]:
        """Return the sums of a tensor after each micro-batch."""
        return {sums.get(name) for sums in self.left}


class PassRunner:
    """Runs micro-batches from the state that training begins with.

    Args:
        trainer: The Trainer, whose state is kept.
        prepare: Restores the state.
    """

    def __init__(self, trainer: Any, prepare: Callable[[], None]) -> None:
        self._trainer, self._prepare = trainer, prepare
        self.steps = 0  # micro-batches so far

    def run(
        self,
        batches: Sequence[Any],
        *,
        seed: int,
        of_one: bool = False,
        cut: bool = False,
        moved: bool = False,
        weights: Sequence[float] = (),
    ) -> Passes:
        """Run micro-batches one after the other, from the state that training begins with.

        Args:
            batches: The micro-batches.
            seed: Seed of the random numbers that they draw.
            of_one: Whether they are parts of one batch of the loop, whose hooks run once.
            cut: Whether they are pieces of it: gradients that are accumulated are complete after the last.
            moved: Whether they lie on the device.
            weights: Their weights, if gradients are accumulated as in training; otherwise each begins with none. The
                gradients returned are those that each micro-batch adds, without its weight.
        """
        self._prepare()
        module = self._trainer.lightning_module
        stop_dropping(module)
        _move_weights(module)
        own = generators_of(module)
        reseed(seed, own)
        before, drawn, places = _watched(module), RandomState(), [(each, generator_state(each)) for each in own]
        states: list[Sums] = []
        gradients: list[list[torch.Tensor]] = []
        for number, batch in enumerate(batches):
            if number == 0 or not weights:
                for parameter in module.parameters():
                    parameter.grad = None
            batch, last = copy_if_possible(batch), number == len(batches) - 1
            trial_steps.accumulate_only(
                self._trainer,
                batch if moved else BatchTransfer(self._trainer).moved(batch),
                number,
                lambda: states.append(_watched(module)),
                begins=not of_one or number == 0,
                ends=last or not of_one,
                continues=cut and bool(weights) and not last,
                batches=1 if of_one else len(batches),
                weight=weights[number] if weights else 1.0,
            )
            self.steps += 1
            if weights:
                gradient_dtype.widen(module.parameters())
            gradients.append([_on_host(gradient) for gradient in _gradients(module)])
        hooks, step = _changed(before, _watched(module)), _changed(*states[:2])
        if weights:
            gradients = _added(gradients, weights)
        draws = not drawn.is_current() or have_moved(places)
        return Passes(gradients, hooks, step, draws, tuple(states[1::2]))


def copy_if_possible(batch: Any) -> Any:
    """Return a copy if the batch can be copied: a step may change its batch in place."""
    try:
        return copied(batch)
    except Exception:  # a batch may hold anything
        return batch


def _added(accumulated: list[list[torch.Tensor]], weights: Sequence[float]) -> list[list[torch.Tensor]]:
    """Return the gradient that each micro-batch has added, without its weight, from the gradients after each."""
    with uncounted():
        wide = [
            [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in each]
            for each in accumulated
        ]
        first, *rest = wide
        added = [first, *([now - then for then, now in zip(*pair)] for pair in zip(wide, rest))]
        return [[gradient / weight for gradient in each] for each, weight in zip(added, weights)]


def _changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in after if differ(before.get(name), after[name]))


@torch.no_grad()
def _move_weights(module: torch.nn.Module) -> None:
    """Move the trained weights a little, the same way each time."""
    for number, parameter in enumerate(module.parameters()):  # copies of a weight (averages) move apart from it
        if parameter.requires_grad and parameter.is_floating_point() and not parameter.is_sparse:
            parameter.mul_(1.0 + MOVED)
            if parameter.numel() <= 2**16:
                generator = torch.Generator(parameter.device).manual_seed(number)
                noise = torch.empty(parameter.shape, device=parameter.device).normal_(generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=MOVED)


def _watched(module: torch.nn.Module) -> Sums:
    """Return sums over weights, and over buffers except those of normalization: state that a step should not change."""
    named = dict([*kept_buffers(module), *module.named_parameters()])
    return dict(zip(named, checksums(named.values())))


def _gradients(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            yield gradient.coalesce() if gradient.is_sparse else gradient


def _on_host(gradient: torch.Tensor) -> torch.Tensor:
    with uncounted():
        return gradient.to("cpu", copy=True)
