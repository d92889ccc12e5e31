"""Run a script until its training has been seen: of a LightningModule, or of a model that returns its loss."""

import copy
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_ga.errors import UserError
from lightning_ga.plan.audit import Audit
from lightning_ga.plan.weights import Samples, TargetTokens
from lightning_ga.step_weights import LOWER, Promotion, Reads, Recorder, in_double, measured


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
                short_fit = partialmethod(audited_fit, trainer.fit, calls)
                stack.enter_context(mock.patch.object(trainer, "fit", short_fit))
        stack.callback(register_module_forward_pre_hook(calls.before_forward).remove)
        stack.callback(register_module_forward_hook(calls.after_forward, with_kwargs=True).remove)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except EnoughError as end:
            if end.args:
                return end.args[0]  # type: ignore[no-any-return]
        return calls.audit()


def audited_fit(trainer: Any, fit: Any, of_models: "Calls", model: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for ``Trainer.fit``: train two epochs, short ones with the same last window, and audit them."""
    if not model.automatic_optimization or trainer.world_size > 1:
        raise UserError(
            f"A script is audited on one device, with automatic optimization: this has {trainer.world_size} "
            f"devices and automatic_optimization={model.automatic_optimization}; use audit(…)."
        )
    from lightning.pytorch.callbacks import LambdaCallback  # only scripts need Lightning

    of_models.stop()
    calls: list[Any] = []
    most = of_models.most // 2  # micro-batches of an epoch
    factor = trainer.accumulate_grad_batches
    given = model.training_step.__code__.co_argcount - 1  # with or without batch_idx

    def shorten(*_: Any) -> None:
        if trainer.num_training_batches > most:
            trainer.fit_loop.max_batches = most - (trainer.num_training_batches - most) % factor

    def note(_: Any, __: Any, batch: Any, index: int) -> None:
        calls.append(((copy.copy(batch), index)[:given], {}))

    trainer.callbacks.append(LambdaCallback(on_train_start=shorten, on_train_batch_start=note))
    trainer.fit_loop.max_epochs = 2
    with in_double(model):
        with Recorder(model, lambda: len(calls)).watching() as recorder:
            fit(trainer, model, *args, **kwargs)
        with mock.patch.multiple(model, log=mock.DEFAULT, log_dict=mock.DEFAULT):
            reads = Reads(calls, loss_of, lambda call: Samples()(call[0]), is_exact=True)
            raise EnoughError(measured(recorder, reads, factor if factor > 1 else None))


class Calls:
    """Calls of a model that returns its loss: the first module in training that does so."""

    def __init__(self, most: int, stack: ExitStack) -> None:
        self.most = most
        self._stack = stack
        self._given: list[Any] = []  # arguments and keywords
        self._recorder: Recorder | None = None
        self._is_over = False

    def before_forward(self, module: Module, _: Any) -> None:
        """Put the outermost module into float64."""
        parameter = next(module.parameters(), None)
        is_lower = parameter is not None and parameter.dtype in LOWER
        if module.training and is_lower and not self._is_over:
            self._stack.enter_context(in_double(module))

    def after_forward(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call, and end the script when there are enough."""
        loss = loss_in(output)
        if self._is_over or not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        if self._recorder is None:
            self._recorder = self._stack.enter_context(Recorder(module, lambda: len(self._given)).watching())
        if module is self._recorder.model:
            if len(self._given) == self.most:
                raise EnoughError
            named = {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}  # of a window
            self._given.append((args, named))

    def stop(self) -> None:
        """Take calls from now on for no training."""
        self._is_over = True

    def audit(self) -> Audit:
        """Audit what was recorded."""
        if self._recorder is None:
            raise UserError("The script trained no LightningModule, and no model that returns its loss: use audit(…).")
        self.stop()
        model = self._recorder.model
        if len(self._given) == self.most:
            del self._given[sum(step.read for step in self._recorder.steps) :]  # the last window was cut off
        reads = Reads(self._given, loss_of, lambda call: items_of(model, *call), is_exact=True)
        return measured(self._recorder, reads, None)


def loss_of(module: Any, call: tuple[Any, Any]) -> Any:
    """Return the loss of one micro-batch, of a LightningModule or of a model that returns it."""
    arguments, named = call
    output = getattr(module, "training_step", module)(*arguments, **named)
    return output if isinstance(output, Tensor) else loss_in(output)


def loss_in(output: Any) -> Any:
    """Return the loss in what a model returns, if there is one."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def items_of(module: Module, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Count what the loss of a model of Transformers is a mean over: targets that are not ignored, or samples."""
    labels = kwargs.get("labels")
    if labels is None or labels.dim() < 2:
        return Samples()([*args, *kwargs.values()])
    function = getattr(module, "loss_function", None)
    return TargetTokens(shift="CausalLM" in getattr(function, "__name__", ""))(kwargs)
