"""Run a script until its training has been seen: of a LightningModule, or of a model whose output has a loss.

Tested in tests/test_audit.py.
"""

import math
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partialmethod, wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as hooks

from lightning_ga.audited_steps import Recorder
from lightning_ga.audited_weights import Reads, measured
from lightning_ga.batch.layout import Samples
from lightning_ga.double_precision import LOWER, Promotion, in_double
from lightning_ga.errors import UserError
from lightning_ga.plan.audit_verdicts import Audit
from lightning_ga.plan.item_counters import TargetTokens
from lightning_ga.snapshot.copies import copied_if_possible


class EnoughError(BaseException):
    """Ends a script whose training was seen."""


def audit_script(path: Path, arguments: Sequence[str], *, most: int) -> Audit:
    """Run a script as a program of its own, until it has trained on so many micro-batches, and audit that training."""
    with ExitStack() as stack:
        calls = Calls(most, stack)
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]))
        stack.enter_context(Promotion())
        for library in ("lightning.pytorch", "pytorch_lightning"):
            with suppress(ImportError):  # the older name may not be installed
                trainer = import_module(library).Trainer
                stack.enter_context(mock.patch.object(trainer, "fit", partialmethod(short_fit, trainer.fit, calls)))
        # The handle of torch 2.15 leaves its number there, and ``torch.compile`` then warns of a hook that is gone.
        stack.enter_context(mock.patch.dict(hooks._global_forward_hooks_with_kwargs))
        stack.callback(hooks.register_module_forward_pre_hook(calls.before_forward).remove)
        stack.callback(hooks.register_module_forward_hook(calls.after_forward, with_kwargs=True).remove)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except (EnoughError, SystemExit):  # many scripts end in ``sys.exit(main())``
            if calls.recorder is None:
                raise
        return calls.audit()


def short_fit(trainer: Any, fit: Any, calls: "Calls", model: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``Trainer.fit``: train for two epochs, short ones with the same last window, then end the script."""
    if not model.automatic_optimization or trainer.world_size > 1:
        raise UserError(
            f"A script is audited on one device, with automatic optimization: this has {trainer.world_size} "
            f"devices and automatic_optimization={model.automatic_optimization}; use audit(…)."
        )
    from lightning.pytorch.callbacks import LambdaCallback  # only scripts need Lightning

    factor = trainer.accumulate_grad_batches
    step = model.training_step
    progress = trainer.fit_loop.epoch_loop.batch_progress

    @wraps(step)
    def recorded(*given: Any) -> Any:
        kept = copied_if_possible(given)  # the step may change its batch
        output = step(*given)
        is_training = trainer.fit_loop.epoch_loop.batch_progress is progress  # isolated passes have a copy
        if is_training and output is not None:
            calls.add(*kept)
        return output

    def shorten(*_: Any) -> None:
        window = trainer.accumulate_grad_batches
        most = max(calls.most // 2, window)
        batches = trainer.num_training_batches
        if batches > most:
            in_last_window = 0  # of a stream, whose windows are full
            if not math.isinf(batches):
                in_last_window = batches % window
            trainer.fit_loop.max_batches = most - (most - in_last_window) % window
            if trainer.val_check_batch is not None:
                trainer.val_check_batch = min(trainer.val_check_batch, trainer.fit_loop.max_batches)

    trainer.callbacks.append(LambdaCallback(on_train_epoch_start=shorten))
    trainer.fit_loop.max_epochs = 2
    calls.of_fit(model, factor)
    precision = trainer.precision_plugin
    with (
        mock.patch.object(model, "training_step", recorded),
        mock.patch.object(precision, "convert_module", lambda module: module),  # it stays in float64
    ):
        fit(trainer, model, *args, **kwargs)
    raise EnoughError


class Calls:
    """Calls of what returns a loss: a LightningModule's step, or the first module in training that does so."""

    def __init__(self, most: int, stack: ExitStack) -> None:
        self.most = most
        self._stack = stack
        self._given: list[Any] = []  # arguments and keywords
        self.recorder: Recorder | None = None
        self._factor: int | None = None
        self._sees_modules = True

    def of_fit(self, model: Module, factor: int) -> None:
        """Record the steps of a LightningModule from now on, and no other module."""
        self._sees_modules = False
        self._factor = factor if factor > 1 else None
        self._stack.enter_context(in_double(model))
        self._record(model)

    def add(self, *arguments: Any, **keywords: Any) -> None:
        """Keep the arguments of a call."""
        self._given.append((arguments, keywords))

    def before_forward(self, module: Module, _: Any) -> None:
        """Put the outermost module into float64."""
        parameter = next(module.parameters(), None)
        is_lower = parameter is not None and parameter.dtype in LOWER
        if self._sees_modules and module.training and is_lower:
            self._stack.enter_context(in_double(module))

    def after_forward(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call, and end the script when there are enough."""
        loss = loss_in(output)
        if not self._sees_modules or not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        if self.recorder is None:
            self._record(module)
        if self.recorder is not None and module is self.recorder.model:
            if len(self._given) == self.most:
                raise EnoughError
            self.add(*args, **{name: kwargs[name] for name in kwargs if name != "num_items_in_batch"})  # of a window

    def audit(self) -> Audit:
        """Audit what was recorded."""
        if self.recorder is None:
            raise UserError(
                "The script trained no LightningModule, and no model whose output has a loss (output.loss, as those of "
                "Transformers): call lightning_ga.audit.audit(…) with the loop."
            )
        model = self.recorder.model
        if self._sees_modules and len(self._given) == self.most:
            del self._given[sum(step.read for step in self.recorder.steps) :]  # the last window was cut off
        self._sees_modules = False  # calls from now on are no training
        reads = Reads(self._given, loss_of, lambda call: items_of(model, *call), is_exact=True)
        with mock.patch.multiple(model, create=True, log=mock.DEFAULT, log_dict=mock.DEFAULT):
            return measured(self.recorder, reads, self._factor)

    def _record(self, model: Module) -> None:
        self.recorder = self._stack.enter_context(Recorder(model, lambda: len(self._given)).watching())


def loss_of(module: Any, call: tuple[Any, Any]) -> Any:
    """Return the loss of one micro-batch, of a LightningModule or of a model that returns it."""
    arguments, keywords = call
    output = getattr(module, "training_step", module)(*arguments, **keywords)
    return output if isinstance(output, Tensor) else loss_in(output)


def loss_in(output: Any) -> Any:
    """Return the loss in what a model returns, if there is one."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def items_of(module: Module, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Count what the loss of a model of Transformers is a mean over: targets that are not ignored, or samples."""
    labels = kwargs.get("labels")
    if labels is None or labels.dim() < 2:
        return Samples()({**dict(enumerate(args)), **kwargs})
    function = getattr(module, "loss_function", None)
    return TargetTokens(shift="CausalLM" in getattr(function, "__name__", ""))(kwargs)
