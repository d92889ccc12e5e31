"""What is set where a window begins: its accumulation factor, learning rates, and when their schedules are due."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_ga.compat import intervals, loops
from lightning_ga.errors import UserError
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.accumulation import AccumulationPlan
from lightning_ga.plan.config import Options, RateRule, Request
from lightning_ga.plan.windows import Chunk, EpochPlan, GrowingEpoch

Values = dict[str, Any]


class WindowFactors:
    """Sets the factor of the window that is trained on, and refuses one that others set.

    It is that of its epoch, or one of its own where a schedule lets windows grow.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._factor: int = trainer.accumulate_grad_batches
        self._plan: GrowingEpoch | None = None  # of an epoch in which windows grow
        self._next: int | None = None  # first micro-batch of the next window, where that may have another factor
        self._size = 0  # samples of the last full window

    def begin_epoch(self, plan: EpochPlan, factor: int) -> None:
        """Set the factor of an epoch; where windows grow, that of its next window."""
        self._factor = self._trainer.accumulate_grad_batches = factor
        self._plan = plan if isinstance(plan, GrowingEpoch) else None
        self._next, self._size = None, 0
        if self._plan is not None:
            self._set(self._plan, plan.done)
            self._next = plan.done  # to be entered

    def enter(self, index: int) -> int | None:
        """Set the factor if a window of its own begins with this micro-batch; return a full one of another size."""
        if self._next is None or index < self._next or loops.skips_backward(self._trainer):
            return None
        assert self._plan is not None, "it has set the next window"
        window = self._set(self._plan, index)
        size, samples = self._plan.nominal(window), self._plan.windows.span(window)[1]
        if samples < size or size == self._size:
            return None
        self._size = size
        return window

    def check(self) -> None:
        """Refuse a factor that a hook has set in the middle of training: windows are weighted for the planned one."""
        found = self._trainer.accumulate_grad_batches
        if found != self._factor and not loops.skips_backward(self._trainer):
            raise UserError(
                f"A callback or hook set trainer.accumulate_grad_batches={found} during training, and AutoAccumulate "
                f"had set {self._factor}: let AutoAccumulate set it, by effective_batch_size= or accumulate=, which "
                "take a mapping such as {0: 64, 5: 256} from the epoch on."
            )

    def close(self) -> None:
        """Let remainders count from the start of the epoch again."""
        if self._plan is not None:
            self._trainer.accumulate_grad_batches = int(self._trainer.accumulate_grad_batches)

    def _set(self, plan: GrowingEpoch, index: int) -> int:
        window, position = plan.place(index)
        start, self._factor = index - position, plan.factor_of(window)
        self._trainer.accumulate_grad_batches = found = loops.WindowFactor(self._factor)
        found.start = start
        self._next = start + self._factor
        return window


class WindowRates:
    """Scales learning rates, and Adam's β₂, with the effective batch, from a window's start to its optimizer step.

    Between steps, and in checkpoints, they are what the user's scheduler has set: a scheduler, and a resume, know
    nothing of the scale. Without the ``name`` of an argument for that, it only logs.
    """

    def __init__(self, trainer: Any, request: Request, rule: RateRule, name: str) -> None:
        self._trainer, self._schedule, self._rule, self._name = trainer, request.by_window, rule, name
        self._keys = ("lr", "betas") if rule.scale_beta2 else ("lr",)
        self._before: list[tuple[Values, Values]] = []  # of each parameter group: what schedulers have set, and ours

    def following(self) -> AbstractContextManager[None]:
        """Return a context in which schedulers meet their own values; refuse optimizers without what is scaled."""
        if not self._name:
            return nullcontext()
        if lacks := next((key for group in self._groups for key in self._keys if group.get(key) is None), None):
            kind = type(self._trainer.optimizers[0]).__name__
            raise UserError(f"{self._name} scales {lacks!r}, and {kind} has none: leave it out.")
        return intervals.before_schedulers(self._trainer, self._end_window)

    def begin_window(self, source: TrainingSource, chunk: Chunk, effective: int, samples_before: int) -> None:
        """Scale the values of every parameter group as the window of a chunk asks for, and log.

        A full one has ``effective`` samples, if none grow; ``samples_before`` are those before the epoch.
        """
        self.give_back()
        epoch, plan, ranks = loops.training_epoch(self._trainer), source.epoch_plan, source.sharded_ranks
        batch, recipe, factor = effective, source.recipe.effective(epoch), 1.0
        if isinstance(plan, GrowingEpoch):
            batch = source.recipe.within(plan.nominal(chunk.window) * ranks, epoch)
        if self._schedule is not None:
            begun = (chunk.window_end - chunk.window_samples) * ranks
            factor = self._schedule.rate(self._trainer.global_step, samples_before + begun)
        for group in self._groups if self._name else ():
            before = {key: group[key] for key in self._keys}
            self._rule.scale(group, group["lr"] * factor if factor != 1.0 else group["lr"], batch, recipe)
            self._before.append((before, {key: group[key] for key in self._keys}))
        values = {"effective_batch_size": batch, "accumulate_grad_batches": int(self._trainer.accumulate_grad_batches)}
        rates = {
            f"learning_rate/{n}" if n else "learning_rate": group.get("lr") for n, group in enumerate(self._groups)
        }
        intervals.log_step(self._trainer, {**values, **rates})

    def _end_window(self) -> None:
        """Give schedulers their own values, and refuse others that wrote the same ones since the window's start."""
        for number, (group, (_, ours)) in enumerate(zip(self._groups, self._before)):
            if key := next(
                (key for key in self._keys if group[key] is not ours[key] and group[key] != ours[key]), None
            ):
                others = self._trainer.callbacks[1:]  # AutoAccumulate is the first
                owners = ", ".join(type(each).__name__ for each in (self._trainer.lightning_module, *others))
                raise UserError(
                    f"{self._name} set {key}={ours[key]} of parameter group {number}, and a hook within the window set "
                    f"{group[key]} (one of {owners}): two hands write the same value. Let a scheduler set it, which is "
                    "multiplied, or leave one of the two out."
                )
        self.give_back()

    def give_back(self) -> None:
        """Give groups back what schedulers had set."""
        for group, (before, _) in zip(self._groups, self._before):
            group.update(before)
        self._before = []

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Let a checkpoint from within a window keep what schedulers had set."""
        saved = [group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]]
        for group, (before, _) in zip(saved, self._before):
            group.update(before)

    @property
    def _groups(self) -> list[Values]:
        return [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]


class StepSchedules:
    """Lets schedules by step be due as in a training in one pass, where the loop counts other batches."""

    def __init__(self, trainer: Any, request: Request, options: Options) -> None:
        self._trainer, self._request, self._by_tokens = trainer, request, options.tokens is not None
        self._frequencies: dict[int, int] = {}  # of those to be steered, as the user wrote them, by position
        self._begins_as_recipe = False

    def begin(self, source: TrainingSource, fed: AccumulationPlan) -> None:
        """Find the schedules, if the loop counts other batches than the recipe's in windows that are cut as ``fed``."""
        trainer, epoch = self._trainer, loops.training_epoch(self._trainer)
        configs = [*enumerate(trainer.lr_scheduler_configs)]
        found = {at: each.frequency for at, each in configs if each.interval == "step" and each.frequency > 1}
        by_epoch = self._request.by_window is None and not self._by_tokens
        if not found or (by_epoch and source.cut_in_step and not source.reads_windows):
            return
        self._frequencies = found
        as_recipe = trainer.accumulate_grad_batches == source.recipe.settings.recipe_factor
        as_recipe &= fed.micro_batch_size == source.recipe.largest_batch(epoch)
        self._begins_as_recipe = by_epoch and as_recipe
        if not self._counts_batches:
            rank_zero_info(
                f"The frequency of schedules by step ({', '.join(map(str, found.values()))}) counts optimizer steps "
                "here, as batches of the loop are micro-batches."
            )

    def step_when_due(self, source: TrainingSource, window: int) -> None:
        """Say whether they are due after a micro-batch of this window of the epoch."""
        if not self._frequencies:
            return
        index = loops.micro_batch_index(self._trainer)
        batches, count = source.batches_after(index) if self._counts_batches else window + 1, index + 1
        # The loop looks whether a frequency divides its count of micro-batches (``training_epoch_loop.py:474``).
        for at, frequency in self._frequencies.items():
            steered = frequency if batches == count else count + (batches % frequency > 0)
            self._trainer.lr_scheduler_configs[at].frequency = steered

    def give_back(self) -> None:
        """Give schedules the frequencies that the user wrote."""
        for at, frequency in self._frequencies.items():
            self._trainer.lr_scheduler_configs[at].frequency = frequency

    @property
    def _counts_batches(self) -> bool:
        """Whether windows are the recipe's, and none are asked for, or training has begun as the recipe."""
        epoch = loops.training_epoch(self._trainer)
        asked = self._request.effective(epoch), self._request.factor(epoch)
        return self._begins_as_recipe or (not self._by_tokens and asked == (None, None))
