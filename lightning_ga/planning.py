"""Plan a training for a device that is not here."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset

from lightning_ga.callback import AutoAccumulate
from lightning_ga.compat.patching import MODULES
from lightning_ga.compat.ranks import settings_on_this_host
from lightning_ga.errors import UserError
from lightning_ga.plan.accumulation import require_count
from lightning_ga.plan.planned_device import DevicePlan, planned_device
from lightning_ga.snapshot.contents import ObjectState
from lightning_ga.snapshot.random_numbers import RandomState
from lightning_ga.snapshot.state import SavedGradients

_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


def plan_for_device(
    module: Any,
    data: Any,
    device_memory: int | str,
    *,
    effective_batch_size: int | None = None,
    devices: int = 1,
    **trainer: Any,
) -> DevicePlan:
    """Estimate the micro-batch and the accumulation factor of a training on a device that is not here.

    A Trainer on this CPU is set up as for ``fit``, and training steps are worked out on tensors
    without values: they take no memory here, whatever the device. Assumed is a CUDA device with
    PyTorch's own allocator, the Trainer's data-parallel strategies, and optimizers over many tensors
    at once (``foreach``), as is their default there. What no tensor can use comes off its memory: 512 MiB
    for the CUDA context, 32 MiB for cuBLAS, 5 % for fragmentation, and on several devices the buckets
    in which gradients are reduced. Scratch memory of single kernels (cuDNN's workspaces) is not seen.

    Args:
        module: The LightningModule, on the CPU. It is given back unchanged.
        data: A DataLoader of training samples, or a datamodule.
        device_memory: Memory of one device: bytes, or text such as ``"16GiB"``.
        effective_batch_size: Samples behind one optimizer step over all devices. ``None`` keeps the
            recipe's: the loader's ``batch_size`` × ``accumulate_grad_batches`` × ``devices``.
        devices: Devices that train together, each with this memory.
        trainer: Other arguments of the Trainer, such as ``precision="bf16-mixed"`` or
            ``gradient_clip_val=1.0``. An ``AutoAccumulate`` among ``callbacks`` is planned with as it is.

    Returns:
        The plan, the estimated limit and peak, and what makes them less certain.

    Raises:
        UserError: If an argument is wrong, if nothing fits, or if the step cannot be worked out
            without its data.

    Examples:
        >>> import torch
        >>> class Small(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(64, 8)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.net(batch[0]).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters())
        >>> data = torch.utils.data.TensorDataset(torch.zeros(4096, 64))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=1024)
        >>> plan_for_device(Small(), loader, "16GiB").plan.factor
        1
    """
    require_count("devices", devices)
    if not isinstance(module, MODULES):
        raise UserError(f"module must be a LightningModule, not {type(module).__name__}.")
    if isinstance(data, Dataset):
        raise UserError(
            f"data must be a DataLoader or a datamodule, not a {type(data).__name__}: make DataLoader(data)."
        )
    root = "lightning.pytorch" if isinstance(module, pl.LightningModule) else "pytorch_lightning"
    given = trainer.pop("callbacks", None)
    callbacks = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    ours = [callback for callback in callbacks if isinstance(callback, AutoAccumulate)]
    others = [callback for callback in callbacks if callback not in ours]
    if ours and effective_batch_size is not None:
        raise UserError(
            f"{effective_batch_size=} and the AutoAccumulate in callbacks both say what is wanted: give one of them."
        )
    callback = ours[0] if ours else AutoAccumulate(effective_batch_size)
    changed, ranks = settings_on_this_host({**trainer, "devices": devices}, root=root)
    with planned_device(device_memory) as device, _unchanged(module):
        made = import_module(root).Trainer(**{**_QUIET, **trainer, **changed}, callbacks=[callback, *others])
        made.strategy.world_size = ranks
        ends = made.limit_train_batches, made.max_epochs, made.max_steps
        made.fit(module, **{"datamodule" if hasattr(data, "train_dataloader") else "train_dataloaders": data})
    plan, probe = callback.plan, callback.probe
    if plan is None or 0 in (*ends, made.num_training_batches):
        raise UserError(
            "Nothing would be trained, so nothing can be planned: give data with a batch, and limit_train_batches, "
            "max_epochs and max_steps other than 0."
        )
    if probe is None:
        raise UserError(
            f"data={type(data).__name__} gives batches that are ready-made and cannot be cut, so no other size can be "
            "planned: give a DataLoader, or a datamodule that makes one."
        )
    return DevicePlan(plan, probe, device.total_bytes, device.reserved_bytes, tuple(device.unreliable))


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Put the module back as it was at the end: precisions convert its tensors, a Trainer sets its modes."""
    random_state, attributes = RandomState(), ObjectState(module.modules())
    gradients = SavedGradients(module.parameters())
    of_gradients = (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
    tensors = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers(), *of_gradients)]
    try:
        yield
    finally:
        attributes.restore()
        module.zero_grad()  # gradients of another dtype would be refused
        for tensor, data in tensors:
            tensor.data = data
        gradients.restore()
        random_state.restore()
