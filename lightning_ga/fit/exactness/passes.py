"""Run micro-batches one after the other as training would, and keep their gradients and what they changed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_ga.compat import gradient_dtype
from lightning_ga.compat.transfer import BatchTransfer
from lightning_ga.compat.trial_steps import PassPlace, run_pass
from lightning_ga.fit.exactness.arithmetic import WithoutDropout, exact_arithmetic, stop_dropping
from lightning_ga.fit.exactness.differences import Gradient
from lightning_ga.loading.samples import copied
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.probe.isolation import isolated
from lightning_ga.snapshot.checksums import checksums, differ
from lightning_ga.snapshot.random_numbers import RandomState, generator_state, generators_of, have_moved, reseed

MOVED = 1e-2  # how far weights are moved, relatively: a teacher of momentum 0.9999 follows by more than rounding

Sums = dict[str, int | None]  # of the bits of tensors, by name


@dataclass(frozen=True, slots=True)
class Passes:
    """The results of micro-batches run one after the other."""

    gradients: list[Gradient]  # after each micro-batch
    changed: tuple[str, ...]  # names of the state that they changed besides gradients
    changed_in_step: tuple[str, ...]  # those that ``training_step`` or the backward pass changed, and no hook
    draws: bool  # whether random numbers were drawn
    states: tuple[Sums, ...]  # after each micro-batch


@contextmanager
def traceless_passes(trainer: Any, *, plain: bool) -> Iterator["PassRunner"]:
    """Return a context in which passes run without dropout, and with exact arithmetic; all state is restored.

    The trained weights are moved a little beforehand, as a first step would move them: so a teacher that starts as a
    copy of its student is seen to follow it.
    """
    with isolated(trainer) as restore, exact_arithmetic(trainer, plain=plain), WithoutDropout():

        def restart() -> None:
            restore()
            stop_dropping(trainer.lightning_module)
            _move_weights(trainer.lightning_module)

        yield PassRunner(trainer, restart)


class PassRunner:
    """Runs micro-batches, each time from the state that ``restart`` puts back.

    Between the micro-batches of a run no state is restored: state that the step keeps (a queue, a teacher that follows
    its student) changes as in training.
    """

    def __init__(self, trainer: Any, restart: Callable[[], None]) -> None:
        self.trainer, self._restart = trainer, restart
        self.transfer = BatchTransfer(trainer)
        self.steps = 0  # micro-batches so far

    def on_device(self, batch: Any) -> Any:
        """Return a batch as its transfer to the device leaves it."""
        self._begin(seed=1)
        return self.transfer.moved(_copy_if_possible(batch))

    def run(
        self,
        batches: Sequence[Any],
        *,
        seed: int,
        as_pieces: bool = False,
        on_device: bool = False,
        weights: Sequence[float] = (),
    ) -> Passes:
        """Run micro-batches one after the other; ``as_pieces`` of one batch of the loop, whose hooks run once.

        With ``weights``, gradients are accumulated as in training; otherwise each micro-batch begins with none.
        """
        module = self.trainer.lightning_module
        self._begin(seed)
        before, random_state = state_sums(module), RandomState()
        generators = [(generator, generator_state(generator)) for generator in generators_of(module)]
        states: list[Sums] = []
        gradients: list[Gradient] = []
        for index, batch in enumerate(batches):
            if index == 0 or not weights:
                for parameter in module.parameters():
                    parameter.grad = None
            is_last = index == len(batches) - 1
            place = PassPlace(
                index,
                begins=not as_pieces or index == 0,
                ends=not as_pieces or is_last,
                continues=as_pieces and bool(weights) and not is_last,
                batches=1 if as_pieces else len(batches),
                weight=weights[index] if weights else 1.0,
            )
            batch = _copy_if_possible(batch)
            moved = batch if on_device else self.transfer.moved(batch)
            run_pass(self.trainer, moved, place, observe=lambda: states.append(state_sums(module)))
            if weights:
                gradient_dtype.widen(module.parameters())
            gradients.append(_gradients(module))
        self.steps += len(batches)
        return Passes(
            gradients,
            changed=_changed(before, state_sums(module)),
            changed_in_step=_changed(*states[:2]),
            draws=not random_state.is_current() or have_moved(generators),
            states=tuple(states[1::2]),
        )

    def _begin(self, seed: int) -> None:
        self._restart()
        reseed(seed, generators_of(self.trainer.lightning_module))


def _copy_if_possible(batch: Any) -> Any:
    """Return a copy if the batch can be copied: a step may change its batch in place."""
    try:
        return copied(batch)
    except Exception:  # a batch may hold anything
        return batch


def state_sums(module: torch.nn.Module) -> Sums:
    """Return sums over the state that a step should not change: weights, and buffers but for normalization, metrics."""
    parts = (part for part in module.modules() if isinstance(part, (_NormBase, Metric)))
    passed_by = {id(buffer) for part in parts for buffer in part.buffers(recurse=False)}
    named = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in passed_by}
    named |= dict(module.named_parameters())
    return dict(zip(named, checksums(named.values())))


def _changed(before: Sums, after: Sums) -> tuple[str, ...]:
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


def _gradients(module: torch.nn.Module) -> Gradient:
    """Return copies of the gradients on the host, zeros if there is none."""
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    gradients = (torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.detach() for p in trained)
    with uncounted():
        return [(g.coalesce() if g.is_sparse else g).to("cpu", copy=True) for g in gradients]
