"""Try to run something on a device, and undo it where memory runs out."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle

from lightning_ga.compat import agreement, log_capture
from lightning_ga.compat.collectives import collectives_run
from lightning_ga.errors import UserError
from lightning_ga.fit.messages import OutOfMemory, of_rank
from lightning_ga.fit.retry_policy import RetryPolicy
from lightning_ga.memory.device import describe_memory
from lightning_ga.memory.oom import Attempt, attempt, is_ambiguous_out_of_memory, is_out_of_memory
from lightning_ga.snapshot.attempt import AttemptSnapshot

Result = TypeVar("Result")
_EXCHANGES = "its step exchanges values with the other ranks (all_gather, all_reduce, the compute of a metric)"


class AttemptRunner:
    """Runs attempts, undoes those that ran out of memory, and learns in which stages ranks wait for each other."""

    def __init__(self, trainer: Any, policy: RetryPolicy) -> None:
        self._trainer = trainer
        self.policy = policy  # what an out-of-memory error leads to
        self.is_active = True  # whether errors are acted upon
        self._distributed = agreement.is_distributed(trainer)
        self._foreseen: Callable[[], int] = lambda: 0  # collectives that a retry does not run again
        self._changing: Collection[str] = ()  # names of what steps are known to change
        self._lockstep: set[str] = set()
        self._undecided: set[str] = set()
        self._last_failures: dict[str, Exception] = {}  # by stage
        self._left: set[str] = set()  # attributes that failed attempts changed and that were not put back
        self._is_taken = False  # whether ``state`` is what it was before the attempt that runs
        self._noting: RemovableHandle | None = None  # the steps of optimizers within attempts

    @cached_property
    def state(self) -> AttemptSnapshot:
        """What attempts change, as it was before."""
        return AttemptSnapshot(self._trainer.lightning_module)

    def begin_training(
        self, policy: RetryPolicy, changing: Collection[str], foreseen: Callable[[], int] = lambda: 0
    ) -> None:
        """Take over the policy of training.

        Args:
            policy: What an out-of-memory error leads to.
            changing: Names of what its steps are known to change.
            foreseen: Counts collectives in steps that do not keep a rank from running one again by itself.
        """
        self._foreseen, self._changing, self.policy = foreseen, changing, policy
        self._watch_training()
        self._lockstep |= {"training"} if policy.lockstep else set()
        self._undecided = {"training"} if policy.undecided else set()

    def look_for_parts(self) -> None:
        """Look at the module anew if parts were added to it, as trackers of metrics do where an epoch begins."""
        if self.policy.retries and not self.state.has_all_parts():
            self.read_module() if self._noting is None else self._watch_training()

    def _watch_training(self) -> None:
        """Look at the module anew, and note the steps of optimizers within attempts."""
        self.end_training()
        self.read_module()
        self.state.weights.expect(self._changing)
        if self.policy.retries:
            self._noting = self.state.weights.note_steps()

    def end_training(self) -> None:
        """Note no more steps of optimizers."""
        if self._noting is not None:
            self._noting.remove()
        self._noting = None

    def read_module(self) -> None:
        """Look at the module anew: its buffers and metrics are other objects once it has been moved."""
        self.state = AttemptSnapshot(self._trainer.lightning_module)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which nothing is caught: a probe wants to see its own errors."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before

    def waits_for_others(self, stage: str) -> bool:
        """Whether ranks wait for each other within the steps of a stage."""
        return stage in self._lockstep

    def may_wait_for_others(self, stage: str) -> bool:
        """Whether they do, or a first batch has to show whether they do."""
        return stage in self._lockstep or stage in self._undecided

    def ran(self, stage: str) -> None:
        """Note that a batch of a stage has run: whether ranks wait has shown."""
        self._undecided.discard(stage)

    def last_failure(self, stage: str) -> Exception | None:
        """Return the out-of-memory error that a stage met last."""
        return self._last_failures.get(stage)

    def pop_left(self) -> tuple[str, ...]:
        """Return the names of attributes that failed attempts changed for good, once."""
        left, self._left = self._left, set()
        return tuple(sorted(left))

    def take(self, batch: Any, *, anew: bool) -> None:
        """Remember what an attempt at these samples may change; all of it ``anew`` but within a window."""
        self._is_taken = False
        if self.policy.retries:
            self.state.take(batch, anew=anew)
            self._is_taken = True

    @property
    def knows_what_changes(self) -> bool:
        """Whether attempts that went through have shown what changes in one."""
        return self.policy.retries and not self.state.is_learning

    def learn(self) -> None:
        """Note that an attempt went through: what changes in one shows."""
        if self._is_taken and self.state.is_learning:
            self.state.learn()

    def undo(self, stage: str, also: Callable[[], str | None], failure: Exception | None) -> None:
        """Put back what an attempt changed; nothing if memory ran out before it began.

        Args:
            stage: What the attempt was for.
            also: Undoes what is special to the stage, and names what cannot be undone.
            failure: The out-of-memory error that makes this necessary, if it was one.

        Raises:
            UserError: If something cannot be put back.
        """
        if not self._is_taken:
            return
        lost = self.state.restore()
        self._left.update(self.state.left)
        lost = also() or lost
        if lost is not None and failure is not None:
            raise self.told(self.out_of_memory(stage).changed_by_the_step(lost)) from failure

    def attempt(self, stage: str, run: Callable[[], Any]) -> Attempt:
        """Run something, and free the memory of what failed.

        Raises:
            UserError: If memory runs out and other ranks would wait for a retry.
        """
        before = self._collectives() if self._distributed else 0
        hook = log_capture.current_hook(self._trainer)
        try:
            ran = attempt(run, self._acts_upon)
        finally:
            if self._distributed and self._collectives() != before:
                self._lockstep.add(stage)
        if ran.failure is not None:
            log_capture.return_to_hook(self._trainer, hook)
            self._last_failures[stage] = ran.failure
            self.raise_if_others_wait(stage, ran.failure)
        return ran

    def raise_if_others_wait(self, stage: str, failure: Exception) -> None:
        """End here if other ranks would wait for what a retry does."""
        why = self.policy.refusal or (_EXCHANGES if stage in self._lockstep else None)
        if why is None:
            return
        if is_ambiguous_out_of_memory(failure):
            raise failure
        raise self.told(self.out_of_memory(stage).cannot_run_again(why)) from failure

    def again_if_memory_runs_out(self, run: Callable[[], Result]) -> Result:
        """Run what undoes itself where it fails: with the step's memory freed, there is room for it.

        Not so where it has exchanged values with other ranks, as they would not do that again.
        """
        before = self._collectives()

        def may_repeat(error: Exception) -> bool:
            return self.policy.retries and is_out_of_memory(error) and self._collectives() == before

        ran = attempt(run, may_repeat)
        return run() if ran.failure is not None else ran.result

    def told(self, error: UserError) -> UserError:
        """Return the error as one rank of several says it."""
        return of_rank(error, self._trainer.world_size)

    def out_of_memory(self, stage: str) -> OutOfMemory:
        """Return the sentences for memory that has run out in a stage."""
        return OutOfMemory(stage, self.memory())

    def memory(self) -> str:
        """Describe the device's memory."""
        return describe_memory(self._trainer.strategy.root_device)

    def _collectives(self) -> int:
        """Return how many collectives this rank has run so far that other ranks take part in at the same place."""
        return collectives_run() - self._foreseen() if self._distributed else 0

    def _acts_upon(self, error: Exception) -> bool:
        """Return whether an error leads to a retry, or to a sentence on why there is none."""
        if is_out_of_memory(error):
            return self.policy.retries or self.policy.refusal is not None
        return self.policy.retries and is_ambiguous_out_of_memory(error)
