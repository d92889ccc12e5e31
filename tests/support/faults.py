"""Out-of-memory errors at chosen operations of a training step."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Faults(TorchDispatchMode):
    """Raises at some operations; counts only while armed."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.count, self.armed = set(at), 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.armed:
            self.count += 1
            if self.count in self.at:
                self.armed = False
                raise torch.OutOfMemoryError(f"Injected: operation {self.count}, {func}.")
        return func(*args, **(kwargs or {}))


class Arm(pl.Callback):
    """Arms faults from the start of every ``training_step`` to the end of its backward pass."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        step = type(pl_module).training_step

        def armed(*arguments: Any) -> Any:
            self.faults.armed = True
            return step(pl_module, *arguments)

        pl_module.__dict__["training_step"] = armed

    def on_after_backward(self, *_: Any) -> None:
        self.faults.armed = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        del pl_module.__dict__["training_step"]
