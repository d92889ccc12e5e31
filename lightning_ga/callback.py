"""``AutoAccumulate``: the hooks that put plan, probe, loaders and weights to work in a Trainer.

Tested in tests/test_public.py and tests/integration/test_exactness.py.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ga.compat.patching import Callback
from lightning_ga.fit.evaluation import Evaluation
from lightning_ga.fit.fit import Fit
from lightning_ga.fit.messages import OomReporter
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.batch_schedule import ScheduleLike
from lightning_ga.plan.config import ScaleLr, read_arguments
from lightning_ga.plan.exactness_verdicts import Exactness
from lightning_ga.plan.records import Fits, ProbeResult
from lightning_ga.plan.run_state import RunState


class AutoAccumulate(Callback):
    """Train with the effective batch you want on the memory you have, with the same gradient.

    Put it in the Trainer's callbacks. Without arguments it keeps the recipe's effective batch (the loader's
    ``batch_size`` × ``Trainer(accumulate_grad_batches=…)`` × ranks) and only makes it fit: it finds
    the largest micro-batch that fits in memory, and cuts every window of samples into the fewest
    near-equal micro-batches.

    The optimizer sees the gradient of the loss that ``training_step`` returns, over the whole window, as if it had run
    in one pass; if it does not, the start of training says so, with a measured number. Hooks, callbacks and
    ``batch_idx`` act as under Lightning's own ``accumulate_grad_batches``; if batches are cut in the step, they act as
    for the whole batch. A value logged by step is that of the window.

    Args:
        effective_batch_size: Samples behind one optimizer step over all ranks: a number, a mapping
            ``{epoch: number}``, a callable of the epoch, or a schedule by optimizer step or samples
            (``lightning_ga.schedule``). ``None`` keeps the recipe's.
        accumulate: Sets the factor instead, in the same forms; the micro-batch is as
            large as fits and leaves at least one full window an epoch.
        micro_batch_size: Samples of one forward and backward pass; ``"auto"`` probes for the limit.
        max_micro_batch_size: Never probe or use more than this.
        micro_batch_multiple: Micro-batches are multiples of this, such as 2 for timm's ``Mixup`` or 8 for tensor cores;
            a last one has what is left if it does not divide the window. Once fewer samples fit, none is a multiple.
        objective: What the probe looks for: ``"memory"`` finds the largest micro-batch that fits, ``"throughput"``
            the smallest whose window takes at most 3 % longer than the fastest.
        memory_budget: The memory that training may use: ``None`` for what the device has free, a
            fraction of its memory, bytes, or text such as ``"10GiB"``.
        normalize: ``"samples"`` weights each micro-batch by its samples. A callable that counts the
            items of a batch, such as ``lightning_ga.counters.TargetTokens()``, makes it exact for a
            loss that is a mean over these. ``None`` leaves Lightning's division by the factor.
        micro_batching: Where batches are cut: ``"loader"`` lets a map-style DataLoader yield micro-batches, each of
            them a batch for callbacks and counters; batches of other data are cut in the step. ``"step"`` cuts all
            batches in the training step, and leaves the loader as it is.
        shares: How ranks share a window: ``"equal"``, ``"memory"`` in proportion to their limits, or ``"speed"`` to
            their samples a second, measured in training over 50 windows at a time. With both, each rank finds a limit
            of its own, and hooks see different numbers of batches on each rank.
        on_oom: What an out-of-memory error in training, validation, test or prediction does: ``"split"``
            runs the window (in evaluation the batch) again in smaller micro-batches; ``"skip"`` also leaves out samples
            that fit in no way, and writes them to ``skipped.csv``; ``"raise"`` ends the run.
        batch_norm: Whether there is a warning if BatchNorm changes the gradient, with the measured difference:
            ``"warn"`` or ``"ignore"``.
        whole: Names of submodules, such as ``("encoder",)``, for losses that compare the samples of a batch: a window
            is one batch of the loop, and these submodules run over it in chunks that fit, each computed again in the
            backward pass. ``micro_batch_size`` is then that of a chunk.
        size_of: For map-style samples of unequal length: a callable ``(dataset, index) -> int``, the name of a column
            or attribute, or ``"auto"`` for the extent that varies. A window keeps its samples; they are sorted by size
            and cut so that samples × longest stays within ``micro_batch_size`` × the longest of all. The sizes of all
            samples are read once, those of a sampler's later epochs as they come.
        checkpoint: Activation checkpointing, with the same gradient: ``"auto"`` computes submodules again in the
            backward pass if not one sample fits without (two where BatchNorm trains), as few as are needed, chosen by
            measuring. With names of submodules these are always computed again.
        scale_lr: Multiplies the scheduler's learning rates by effective batch ÷ the recipe's (``"linear"``), or by the
            root of that (``"sqrt"``), in every parameter group.
        verify: Whether exactness is measured at the start, and rarely on a micro-batch of training.
        cache: Whether the limit is remembered between runs, for the same model, data shape, precision,
            optimizer, device and budget; one step verifies a remembered limit.

    Raises:
        UserError: If an argument is wrong, or contradicts another or the Trainer.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutoAccumulate(effective_batch_size=256)], logger=False, barebones=False)
    """

    def __init__(
        self,
        effective_batch_size: ScheduleLike | None = None,
        *,
        accumulate: ScheduleLike | None = None,
        micro_batch_size: int | Literal["auto"] = "auto",
        max_micro_batch_size: int | None = None,
        micro_batch_multiple: int = 1,
        objective: Literal["memory", "throughput"] = "memory",
        memory_budget: int | float | str | None = None,
        normalize: Literal["samples"] | Callable[[Any], Any] | None = "samples",
        micro_batching: Literal["loader", "step"] = "loader",
        shares: Literal["equal", "memory", "speed"] = "equal",
        on_oom: Literal["split", "skip", "raise"] = "split",
        batch_norm: Literal["warn", "ignore"] = "warn",
        whole: tuple[str, ...] | list[str] | str = (),
        size_of: Callable[[Any, Any], int] | str | None = None,
        checkpoint: tuple[str, ...] | list[str] | str | None = None,
        scale_lr: ScaleLr = "none",
        verify: bool = True,
        cache: bool = True,
    ) -> None:
        self._given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._request, self._options = read_arguments(self._given)
        self._fit: Fit | None = None  # the last one, for what it has found
        self._running_fit: Fit | None = None  # between ``setup`` and ``teardown``
        self._reporter: OomReporter | None = None
        self._evaluation: Evaluation | None = None  # while a stage runs

    def __repr__(self) -> str:
        defaults = signature(AutoAccumulate).parameters
        shown = [f"{name}={value!r}" for name, value in self._given.items() if value != defaults[name].default]
        return f"AutoAccumulate({', '.join(shown)})"

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before data are set up, and if other processes train (``ddp_spawn``)."""
        return None if self._fit is None else self._fit.plan

    @property
    def fits(self) -> Fits | None:
        """What a whole window takes if it fits in one pass, so that no limit was looked for; else ``None``."""
        return None if self._fit is None else self._fit.search.fits

    @property
    def probe(self) -> ProbeResult | None:
        """What the probe found; ``None`` before training, if whole windows fit, and if there was none or it failed."""
        return None if self._fit is None else self._fit.search.found.result

    @property
    def exactness(self) -> Exactness | None:
        """What was measured; ``None`` before training, while nothing is accumulated, and with ``verify=False``."""
        return None if self._fit is None else self._fit.verdict.exactness

    def optimizer_steps(self) -> int | None:
        """Optimizer steps of the whole training; see ``lightning_ga.optimizer_steps``."""
        return None if self._fit is None else self._fit.optimizer_steps()

    @property
    def oom_events(self) -> int:
        """Out-of-memory errors that were survived since the last fit began, including those before a resume."""
        return 0 if self._reporter is None else self._reporter.events

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Intercept the loader of a fit and the errors of evaluation; the rest follows as training starts."""
        if stage == "fit":
            self._reporter = OomReporter(trainer)
            self._begin_fit(trainer, self._reporter)
        else:
            self._reporter = OomReporter(trainer, self.oom_events)  # of the last fit, and of evaluations since
        self._evaluation = Evaluation(trainer, self._reporter, self._options)

    def _begin_fit(self, trainer: Any, reporter: OomReporter) -> None:
        self._fit = None  # if making this one fails, ``plan`` must not show that of the fit before
        self._fit = Fit(trainer, self._request, self._options, reporter, lambda: self in trainer.callbacks)
        self._running_fit = self._fit
        # First, so that other callbacks see its gradients.
        trainer.callbacks = [self, *(other for other in trainer.callbacks if other is not self)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the limit and begin the epoch with it; a resumed run continues at its sample."""
        self._started_fit.start()
        rank_zero_info(f"AutoAccumulate: {self._started_fit.summary()}")
        self._log_arguments(trainer)
        self._started_fit.verdict.warn()

    def _log_arguments(self, trainer: Any) -> None:
        arguments = {
            name: value if isinstance(value, int | float | str | None) else repr(value)
            for name, value in self._given.items()
        }
        for logger in trainer.loggers:
            try:
                logger.log_hyperparams({"AutoAccumulate": {**arguments, "plan": str(self.plan)}})
            except Exception as error:  # MLflow refuses another plan in a run that goes on; training does not need it
                rank_zero_warn(f"{type(logger).__name__} has not taken the arguments of AutoAccumulate: {error}")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Cut the epoch as its schedule says."""
        self._started_fit.start_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Find the weight of the micro-batch."""
        self._started_fit.begin_micro_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Multiply the backward pass by the weight of the micro-batch."""
        self._started_fit.parts.gradients.apply_weight(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Coalesce sparse gradients and widen half-precision ones between two backward passes."""
        self._started_fit.parts.gradients.settle()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Mark that the update begins, and finish the gradients of the window."""
        self._started_fit.close_window(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the position if a window is over."""
        self._started_fit.end_micro_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore what the fit changed in model, schedules and loops."""
        self._started_fit.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the patches; if memory ran out, add what holds it to the error."""
        try:
            if self._running_fit is not None:
                self._running_fit.fail(exception)
        finally:
            self._leave_trainer()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the patches. The factor stays until the next fit, as with Lightning's own scheduler."""
        if self._running_fit is not None:
            self._running_fit.close()  # with max_epochs=0 Lightning calls no on_train_end
        self._leave_trainer()

    def _leave_trainer(self) -> None:
        if self._evaluation is not None:
            self._evaluation.stop()
        self._evaluation = None
        self._running_fit = None

    def state_dict(self) -> dict[str, Any]:
        """Seed and position of the data and what the probe found, as plain values."""
        return {} if self._fit is None else self._fit.state().to_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the data's seed and position; called before the loader is cut."""
        if self._running_fit is not None:
            self._running_fit.restore(RunState.from_dict(state_dict))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the rates that schedulers have set into a checkpoint."""
        if self._running_fit is not None:
            self._running_fit.rates.save(checkpoint)

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes get: the arguments, not the fit that is running."""
        return {**self.__dict__, **dict.fromkeys(("_fit", "_running_fit", "_evaluation", "_reporter"))}

    @property
    def _started_fit(self) -> Fit:
        assert self._running_fit is not None, "hooks of training run after setup"
        return self._running_fit
