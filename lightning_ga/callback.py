"""``AutoAccumulate``: the hooks that put plan, probe, loaders and weights to work in a Trainer."""

from collections.abc import Callable
from functools import cached_property
from inspect import signature
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ga.compat import loops
from lightning_ga.compat.patching import Callback
from lightning_ga.errors import ExactnessWarning, UserError
from lightning_ga.fit import checks
from lightning_ga.fit.evaluation import Evaluation
from lightning_ga.fit.fit import Fit
from lightning_ga.fit.oom_messages import OomReporter
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.checkpoint import RunState
from lightning_ga.plan.config import ScaleLr, read_arguments
from lightning_ga.plan.exactness import Exactness
from lightning_ga.plan.records import ProbeResult
from lightning_ga.plan.schedule import ScheduleLike


class _ClassGivenError(UserError, AttributeError):
    """A class stands where an object should; to those who look classes through, an attribute that is not there."""


class _OfObjects(cached_property[str]):
    """An attribute that the class itself does not have: ``Trainer(callbacks=[AutoAccumulate])`` reads it there."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            return super().__get__(instance, owner)
        raise _ClassGivenError(f"callbacks=[{owner.__name__}] holds the class: write callbacks=[{owner.__name__}()].")


class AutoAccumulate(Callback):
    """Train with the effective batch you want on the memory you have, with the same gradient.

    Put it in the Trainer's callbacks. Alone it keeps the recipe's effective batch (the loader's
    ``batch_size`` × ``Trainer(accumulate_grad_batches=…)`` × ranks) and only makes it fit: it finds
    the largest micro-batch that the device holds, cuts every window of samples into the fewest
    near-equal micro-batches, and weights each by its true share. Works with the trainers of
    ``lightning.pytorch`` and ``pytorch_lightning``.

    Args:
        effective_batch_size: Samples behind one optimizer step over all ranks: a number, a mapping
            ``{epoch: number}``, a callable of the epoch, or a schedule by optimizer step or samples
            (``lightning_ga.schedule``); or text such as ``"65536 tokens"``: as many samples as stay within so many
            tokens, counted by ``size_of``, which is then ``"auto"`` by default. ``None`` keeps the recipe's.
        accumulate: Fixes the factor instead (as above); the micro-batch is as
            large as fits and leaves at least one full window an epoch.
        micro_batch_size: Samples of one forward and backward pass; ``"auto"`` probes for the limit.
        max_micro_batch_size: Never probe or use more than this.
        objective: What the probe looks for: ``"memory"`` takes the largest micro-batch that fits, ``"throughput"``
            the smallest whose window takes at most 3 % longer than the fastest.
        memory_budget: What a training step may take: ``None`` for what the device has free, a
            fraction of its memory, bytes, or text such as ``"10GiB"``.
        normalize: ``"samples"`` weights each micro-batch by its samples. A callable that counts the
            items of a batch, such as ``lightning_ga.weights.TargetTokens()``, makes it exact for a
            loss that is a mean over these. ``None`` leaves Lightning's division by the nominal factor.
        micro_batching: Where batches are cut: ``"loader"`` lets the DataLoader yield micro-batches, so that one
            is a batch for every callback and counter. ``"step"`` lets it yield the recipe's batches and cuts
            each within the training step.
        on_oom: What an out-of-memory error in training, validation, test or prediction does: ``"split"``
            runs the batch again in parts, with the same result; ``"raise"`` ends the run.
        batch_norm: What is done about BatchNorm layers, whose gradients are those of the micro-batch:
            ``"warn"`` says so, with the measured difference; ``"ignore"`` does not.
        whole: Names of submodules, such as ``("encoder",)``, for losses that compare the samples of a batch: a window
            is one batch of the loop, and these submodules run over it in chunks that fit, each computed again in the
            backward pass. ``micro_batch_size`` is then that of a chunk. ``"auto"`` finds the submodules.
        size_of: For samples of unequal length: a callable ``(dataset, index) -> int``, the name of a column or
            attribute, or ``"auto"`` for the extent that varies. A window keeps its samples; they are sorted by size
            and cut where samples × longest reaches what ``micro_batch_size`` of the longest samples take. The sizes of
            all samples are read once, before training. Batches that are cut in the step show them by a mask or by
            lengths, which ``"auto"`` finds or a name says.
        scale_lr: Multiplies what the scheduler sets by effective batch ÷ the recipe's (``"linear"``), or by the root
            of that (``"sqrt"``), in every parameter group.
        scale_beta2: Whether Adam's β₂ is raised to the power of effective batch ÷ the recipe's, which keeps its
            half-life in samples.
        verify: Whether exactness is measured once at the start, on up to five samples.
        cache: Whether the limit is remembered between runs, for the same model, data shape, precision,
            optimizer, device and budget; one step verifies a remembered one.

    Raises:
        UserError: If an argument is wrong, or contradicts another or the Trainer.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutoAccumulate(effective_batch_size=256)], logger=False, barebones=False)
    """

    def __init__(
        self,
        effective_batch_size: ScheduleLike | str | None = None,
        *,
        accumulate: ScheduleLike | None = None,
        micro_batch_size: int | Literal["auto"] = "auto",
        max_micro_batch_size: int | None = None,
        objective: Literal["memory", "throughput"] = "memory",
        memory_budget: int | float | str | None = None,
        normalize: Literal["samples"] | Callable[[Any], Any] | None = "samples",
        micro_batching: Literal["loader", "step"] = "loader",
        on_oom: Literal["split", "raise"] = "split",
        batch_norm: Literal["warn", "ignore"] = "warn",
        whole: tuple[str, ...] | list[str] | str = (),
        size_of: Callable[[Any, Any], int] | str | None = None,
        scale_lr: ScaleLr = "none",
        scale_beta2: bool = False,
        verify: bool = True,
        cache: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._given = given
        self._request, self._options = read_arguments(given)
        self._fit: Fit | None = None
        self._evaluation: Evaluation | None = None  # of a stage on its own
        self._is_fitting = False
        self._reporter: OomReporter | None = None
        self._place: int | None = None  # among the callbacks, where the user put it

    state_key = _OfObjects(lambda self: type(self).__qualname__)

    def __repr__(self) -> str:
        defaults = signature(AutoAccumulate).parameters
        shown = [f"{name}={value!r}" for name, value in self._given.items() if value != defaults[name].default]
        return f"AutoAccumulate({', '.join(shown)})"

    @property
    def plan(self) -> AccumulationPlan | None:
        """How a full window is cut; ``None`` before training."""
        return self._fit.plan if self._fit else None

    @property
    def probe(self) -> ProbeResult | None:
        """What the probe found; ``None`` before training and if none was needed."""
        return self._fit.probe if self._fit else None

    @property
    def exactness(self) -> Exactness | None:
        """What the exactness check measured; ``None`` before training and with ``verify=False``."""
        return self._fit.exactness.training if self._fit else None

    def optimizer_steps(self) -> int | None:
        """Optimizer steps of the whole training; see ``lightning_ga.optimizer_steps``."""
        return self._fit.optimizer_steps() if self._fit else None

    @property
    def oom_events(self) -> int:
        """Out-of-memory errors that were survived since the last fit began, those before a resume too."""
        return self._reporter.events if self._reporter else 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the run between the user's loader and the fit loop, and between batches and the errors they may meet."""
        if stage != "fit":
            self._reporter = self._reporter or OomReporter(trainer)
            self._evaluation = Evaluation(trainer, self._reporter, self._options)
            return
        self._is_fitting = True
        loops.take_factor_back(trainer)
        checks.check_trainer(trainer, pl_module, self._request)
        checks.check_schedule(self._request, loops.training_epochs(trainer), trainer.world_size)
        self._place = loops.move_callback(trainer, self, 0)  # others see its gradients
        self._reporter = OomReporter(trainer)
        self._fit = Fit(trainer, self._request, self._options, self._reporter, callback=self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the limit and begin the epoch with it; a resumed run goes on at its sample."""
        self._started_fit.start()
        rank_zero_info(f"AutoAccumulate: {self._started_fit.told.summary()}")
        for message in self._started_fit.told.warnings():
            rank_zero_warn(message, category=ExactnessWarning)
        self._started_fit.show_next_window()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Cut the epoch as its schedule says."""
        self._started_fit.start_epoch()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Find the weight of the micro-batch."""
        checks.check_automatic(pl_module)
        self._started_fit.prepare(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Let the micro-batch weigh what its samples weigh in the window."""
        self._started_fit.begin_backward(loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Keep gradients as they should be between two backward passes."""
        self._started_fit.end_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Bring the window's gradients to the mean over what turned out to be in it."""
        self._started_fit.close_window(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the position, and let validation run when the recipe says."""
        self._started_fit.advance(batch)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Note which batch is evaluated: if memory runs out, its samples may have to be read again."""
        evaluation = self._evaluation or (self._fit.evaluation if self._fit else None)
        if evaluation is not None:
            evaluation.number, evaluation.loader = batch_idx, dataloader_idx

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a loader that did not yield the whole epoch."""
        self._started_fit.check_epoch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give model and schedules back what the user wrote."""
        self._started_fit.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the trainer as it was found; if memory ran out, say what holds it."""
        if "multiple optimizers" in str(exception):  # it would send the user to where AutoAccumulate is refused
            exception.add_note(f"AutoAccumulate steers the automatic optimization of one optimizer: {checks.BY_HAND}")
        if self._fit and self._is_fitting:
            self._fit.fail(exception)
        self._take_back(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the patches back. The factor stays until the next fit, as with Lightning's own scheduler."""
        if stage == "fit" and self._fit:
            self._fit.close()  # a training that Lightning skips, such as with max_epochs=0, has no on_train_end
            loops.leave_factor(trainer, self._fit.recipe_factor, self._fit.progress.samples_seen)
        self._take_back(trainer)

    def _take_back(self, trainer: Any) -> None:
        for evaluation in (self._evaluation, self._fit.evaluation if self._fit else None):
            if evaluation is not None:
                evaluation.stop()
        self._evaluation, self._is_fitting = None, False
        if self._place is not None:
            loops.move_callback(trainer, self, self._place)
        self._place = None

    def state_dict(self) -> dict[str, Any]:
        """Seed and position of the data and what the probe found, as plain values."""
        return self._fit.state().to_dict() if self._fit else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the data's seed and position over; called before the loader is cut."""
        if self._fit and self._evaluation is None:
            self._fit.restore(RunState.from_dict(state_dict))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the loop's part of a checkpoint say to stock Lightning where this run is."""
        if self._fit and self._evaluation is None:
            self._fit.save_loop(checkpoint, self.state_key)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the loop's part of a checkpoint in this run's own units."""
        if self._fit and self._evaluation is None:
            self._fit.load_loop(checkpoint, self.state_key)

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to other processes: what was asked for, not the fit that is running."""
        running = dict.fromkeys(("_fit", "_evaluation", "_reporter", "_place"))
        return {**self.__dict__, **running, "_is_fitting": False}

    @property
    def _started_fit(self) -> Fit:
        assert self._fit is not None, "hooks of training run after setup"
        return self._fit
