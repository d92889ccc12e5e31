"""A context in which a Trainer may run steps that leave no trace."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning_ga.compat import dataloaders, patching, trial_steps
from lightning_ga.memory.live_tensors import uncounted
from lightning_ga.snapshot.contents import ObjectState
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.savepoint import Savepoint
from lightning_ga.snapshot.state import OptimizerState, ReachedState, SavedGradients, SwappedState, TensorValues


@contextmanager
def isolated(
    trainer: Any, stand_ins: Mapping[int, Any] | None = None, *, begins: bool = True
) -> Iterator[Callable[[], None]]:
    """Let trial steps run as a context; the yielded function puts back all they changed, and so does the end.

    By the id of an object, ``stand_ins`` say what attributes of modules refer to in its place meanwhile. Once training
    has begun, trials take no optimizer step.
    """
    module = trainer.lightning_module
    modules = list(module.modules())
    modules += [other for other in trainer.strategy.model.modules() if all(other is not known for known in modules)]
    random_state = RandomState()
    attributes = trial_steps.remember_progress(trainer)
    with uncounted():
        own = (each for m in modules for each in (*m._parameters.values(), *m._buffers.values()) if each is not None)
        values = TensorValues(iter({id(tensor): tensor for tensor in own}.values()))
        plain = SwappedState(modules, [trainer, trainer.strategy, trainer.datamodule], stand_ins)
        optimizers = [OptimizerState(optimizer) for optimizer in trainer.optimizers if begins]
    gradients = SavedGradients(module.parameters())
    objects = ObjectState(trial_steps.owners(trainer))
    reached = ReachedState(module, [trainer, trainer.strategy, trainer.datamodule])

    kept: tuple[Any, ...] = (gradients, plain, values, *optimizers, objects, reached, attributes, random_state)

    def restore() -> None:
        for each in kept:
            each.restore()

    def prepare() -> None:
        restore()
        with uncounted():
            plain.swap_in_copies()
            attributes.swap_in_copies()
            reached.swap_in_copies()
        trial_steps.enter_trial(trainer, begins=begins)

    try:
        prepare()
        yield prepare
    finally:
        restore()


@contextmanager
def hooks_apart(trainer: Any) -> Iterator[None]:
    """Let hooks of batches be called apart from training, as a context: what they change is put back."""
    profiler, trainer.profiler = trainer.profiler, patching.sibling(trainer, "profilers").PassThroughProfiler()
    try:
        with _kept_apart(trainer) if dataloaders.hooks_see_batches(trainer) else nullcontext():
            yield
    finally:
        trainer.profiler = profiler


@contextmanager
def _kept_apart(trainer: Any) -> Iterator[None]:
    module, random_state = trainer.lightning_module, RandomState()
    plain = SwappedState(list(module.modules()), [trainer, trainer.strategy, trainer.datamodule])
    tensors = Savepoint(module)
    tensors.take()
    plain.swap_in_copies()
    try:
        yield
    finally:
        plain.restore()
        tensors.restore()
        random_state.restore()
