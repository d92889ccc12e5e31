"""The probe inside a Trainer: real training steps on samples of the real data, leaving no trace.

A trial is the worst micro-batch of an accumulated window, its last: the gradients of the others are
alive, then forward, backward, clipping and the optimizer step, through the strategy and the
precision plugin. Afterwards everything that a step changes is put back (``snapshot``).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from lightning_ga import seams
from lightning_ga.finder import find_micro_batch
from lightning_ga.live import uncounted
from lightning_ga.loaders import collate_samples, collect_samples
from lightning_ga.oom import is_out_of_memory, release
from lightning_ga.search import ProbeResult
from lightning_ga.snapshot import Attributes, OptimizerState, PlainState, RandomState, TensorValues

SAMPLES_KEPT = 32  # distinct samples in a trial batch


def probe(
    trainer: Any,
    loader: "DataLoader[Any]",
    indices: list[Any],
    *,
    high: int,
    share: int,
    budget: int | float | str | None,
) -> ProbeResult:
    """Find the largest micro-batch of a training step of this Trainer.

    Args:
        trainer: A Trainer that has set up data, model and optimizer, at ``on_train_start``.
        loader: The user's DataLoader, for its dataset and the way it collates samples.
        indices: Indices of samples to try; the heaviest of them make up the trial batches.
        high: Largest micro-batch that is of use, in samples.
        share: Samples of a window on one rank.
        budget: ``memory_budget`` as the user wrote it.

    Raises:
        UserError: If not even the smallest micro-batch fits.
    """
    with traceless(trainer) as restore:
        samples = heaviest(collect_samples(loader, indices), SAMPLES_KEPT)
        step = TrialStep(trainer, loader, samples)
        with uncounted():
            alive = WindowGradientsAlive(trainer, seams.to_device(trainer, collate_samples(loader, samples, 2)), share)

        def reset() -> None:
            restore()
            alive.fill()

        return find_micro_batch(
            step,
            high=high,
            budget=budget,
            device=trainer.strategy.root_device,
            resident=lambda: resident_tensors(trainer),
            reset=reset,
            agree=lambda fits: seams.sum_over_ranks(trainer, float(not fits)) == 0,
        )


class TrialStep:
    """One training step of the Trainer on a batch of a given size.

    Args:
        trainer: The Trainer.
        loader: The user's loader, which collates the samples.
        samples: Samples to fill batches with, in turn.
    """

    def __init__(self, trainer: Any, loader: "DataLoader[Any]", samples: list[Any]) -> None:
        self._trainer = trainer
        self._loader = loader
        self._samples = samples

    def __call__(self, micro_batch_size: int) -> None:
        """Forward, backward, clipping and the optimizer step on so many samples."""
        trainer = self._trainer
        epoch_loop = trainer.fit_loop.epoch_loop
        batch = collate_samples(self._loader, self._samples, micro_batch_size)
        batch = seams.to_device(trainer, batch)
        trainer._logger_connector.on_batch_start(batch)
        kwargs = epoch_loop._build_kwargs(OrderedDict(), batch, 1)
        with seams.muted(trainer), seams.without_collectives(trainer):
            seams.call_module_hook(trainer, "on_train_batch_start", batch, 1)
            outputs = epoch_loop.automatic_optimization.run(trainer.optimizers[0], 1, kwargs)
            seams.call_module_hook(trainer, "on_train_batch_end", outputs, batch, 1)
        trainer._logger_connector.on_batch_end()


@contextmanager
def traceless(trainer: Any) -> Iterator[Callable[[], None]]:
    """Within, trial steps may run, and the yielded function puts back all they changed; so does the end."""
    module = trainer.lightning_module
    modules = list(module.modules())
    modules += [other for other in trainer.strategy.model.modules() if all(other is not known for known in modules)]
    random_state = RandomState()
    attributes = seams.remember_progress(trainer, Attributes())
    with uncounted():
        values = TensorValues(iter({id(t): t for m in modules for t in _own_tensors(m)}.values()))
        plain = PlainState(modules, shared=[trainer, trainer.strategy, trainer.datamodule])
        optimizers = [OptimizerState(optimizer) for optimizer in trainer.optimizers]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]

    def restore() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        plain.restore()
        values.restore()
        for optimizer in optimizers:
            optimizer.restore()
        attributes.restore()
        random_state.restore()

    def prepare() -> None:
        restore()
        with uncounted():
            plain.swap_in_copies()
            attributes.swap_in_copies()
        seams.enter_trial(trainer)

    with ExitStack() as stack:
        stack.callback(restore)
        prepare()
        yield prepare


class WindowGradientsAlive:
    """Gradients of the window's earlier micro-batches, alive as they are in its last.

    Which parameters have one, and whether it is sparse, is seen in a backward pass of two samples. A
    sparse one has the rows of a whole window.

    Args:
        trainer: The Trainer, its state swapped for a trial.
        batch: Two samples.
        share: Samples of a window on one rank.
    """

    def __init__(self, trainer: Any, batch: Any, share: int) -> None:
        refused = None
        try:
            seams.backward_only(trainer, batch)
        except Exception as error:
            refused = error
        if refused is not None:
            if not is_out_of_memory(refused):
                raise refused
            release(refused)
        parameters = list(trainer.lightning_module.parameters())
        if refused is not None:  # the finder will say that nothing fits; until then all may have a gradient
            self._having: list[tuple[torch.Tensor, int | None]] = [(p, None) for p in parameters if p.requires_grad]
            return
        self._having = [
            (p, _rows(p.grad, share) if p.grad.is_sparse else None) for p in parameters if p.grad is not None
        ]

    def fill(self) -> None:
        """Give every parameter its gradient, of zeros."""
        for parameter, rows in self._having:
            parameter.grad = torch.zeros_like(parameter) if rows is None else _sparse_zeros(parameter, rows)


def _rows(gradient: torch.Tensor, share: int) -> int:
    """Most distinct rows that a window's sparse gradient may have."""
    return int(min(len(gradient), gradient.coalesce().indices().shape[1] / 2 * share))


def _sparse_zeros(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    values = parameter.new_zeros(rows, *parameter.shape[1:])
    indices = torch.arange(rows, device=parameter.device)[None]
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True)


def resident_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    """Tensors that lie on the device before a step: parameters, buffers, gradients, optimizer state."""
    module = trainer.lightning_module
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def heaviest(samples: list[Any], count: int) -> list[Any]:
    """The samples with the most elements, heaviest first."""
    return sorted(samples, key=elements, reverse=True)[:count]


def elements(sample: Any) -> int:
    """Elements of all tensors, arrays and sequences in a sample of any structure.

    Examples:
        >>> elements({"image": torch.zeros(3, 4), "label": 1})
        13
    """
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if hasattr(sample, "size") and isinstance(sample.size, int):  # a NumPy array
        return sample.size
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, dict):
        return sum(map(elements, sample.values()))
    if isinstance(sample, (list, tuple)):
        return sum(map(elements, sample))
    return sum(map(elements, vars(sample).values())) if hasattr(sample, "__dict__") else 1


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def hardware(trainer: Any, budget: int | float | str | None) -> str:
    """What a limit depends on besides the user's code: device, memory, budget, precision, ranks, versions."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name} {properties.total_memory}"
    else:
        name = f"{device.type} {psutil.virtual_memory().total}"
    return f"{name}, budget {budget}, {trainer.precision}, {trainer.world_size} ranks, torch {torch.__version__}"
