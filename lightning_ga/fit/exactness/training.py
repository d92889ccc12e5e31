"""What is known of the exactness of a training: as measured before it, and as it shows later."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ga.batch.layout import LayoutError
from lightning_ga.compat import ranks
from lightning_ga.errors import ExactnessWarning, UserError
from lightning_ga.fit.chunks import ChunkedModules
from lightning_ga.fit.exactness.measure import depends_on_ranks, find_independent, measure_exactness
from lightning_ga.fit.exactness.passes import rounding
from lightning_ga.loading.reader import BatchReader
from lightning_ga.loading.training_source import TrainingSource
from lightning_ga.plan.config import Options
from lightning_ga.plan.exactness import (
    ACROSS_RANKS,
    INEXACT,
    LEFT_OUT,
    SAME_RESULT,
    Exactness,
    Verdicts,
    both,
    found_to_change,
    splitting_sentence,
    uncuttable,
    unmeasured,
)
from lightning_ga.plan.planned_device import current_device


@dataclass(frozen=True, slots=True)
class Remeasured:
    """The result of a measurement on a micro-batch of training."""

    verdict: Exactness | None = None  # ``None`` if it could not be made
    matters: tuple[str, ...] = ()  # names of suspects that the gradient depends on, or may depend on


_NOT_EXACT = {
    "model": "Accumulation is not exact for this model",
    "training": "Accumulation is not exact for this training",
}


class TrainingExactness:
    """Keeps the verdicts, and tells the user once if they are bad."""

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self.count = options.normalize if callable(options.normalize) else None  # of the items of a batch
        self.training: Exactness | None = None  # the verdict on the micro-batches of training
        self.splitting: Exactness | None = None  # the verdict on batches that are cut in the step
        self._changing: set[str] = set()  # names of what the step was seen to change
        self.kinds: set[Any] = set()  # of samples that were measured
        # What changed between two passes, by name, with former values of numbers: whether that matters is not known.
        self.suspects: dict[str, float | None] = {}
        self._between_pieces: tuple[str, ...] = ()  # names of what changes between the pieces of a batch
        self._harmless: set[str] = set()  # names of what changed, and no gradient depends on
        self._user_knows = False  # that accumulation is not exact, if it is not
        self._unknown: set[str] = set()  # reasons why it was not measured, which were told

    @property
    def is_measured(self) -> bool:
        """Whether nothing is left to be measured."""
        return self.training is not None and self.training.cause != "unmeasured"

    @property
    def changing(self) -> set[str]:
        """Names of what the step was seen to change."""
        verdicts = filter(None, (self.training, self.splitting))
        return self._changing.union(*(verdict.tensors for verdict in verdicts))

    def measure(
        self,
        source: TrainingSource,
        reader: BatchReader,
        *,
        epoch: int,
        limit: int,
        chunked: ChunkedModules | None = None,
    ) -> None:
        """Measure exactness at the begin of an epoch, in passes of at most ``limit`` samples, if that is wanted."""
        if not self._options.verify or current_device() is not None:
            return
        how, before = partial(measure_exactness, self._trainer, source, reader, self.count), ranks.collectives_run()
        try:
            measured = how(epoch=epoch, limit=limit, chunked=chunked)
            if reader.cuts_by_size and source.cut_in_step:
                self._refuse_to_trim(measured, reader, partial(how, epoch=epoch, limit=limit))
        except LayoutError as why:
            measured = both(uncuttable(rounding(self._trainer), str(why)))
        asks = ranks.collectives_run() != before and chunked is None
        measured = self._of_all_ranks(measured)
        where = {"epoch": epoch, "limit": limit}
        if self._exchanges(measured, asks) and depends_on_ranks(self._trainer, source, reader, **where):
            coupled = replace(measured.training, relative_error=None, cause="coupled", reason=ACROSS_RANKS)
            measured = replace(measured, training=coupled, splitting=coupled)
        elif measured.training.cause == "coupled":
            found = find_independent(self._trainer, source, reader, epoch=epoch)
            training = replace(measured.training, whole=found.names, bytes_per_sample=found.bytes_per_sample)
            measured = replace(measured, training=training)
        self.training, self.splitting = measured.training, measured.splitting
        self._changing.update(measured.changing)
        self._harmless.update(measured.tables)
        self.kinds.update(measured.kinds)

    def _of_all_ranks(self, measured: Verdicts) -> Verdicts:
        """Let all ranks have the same verdicts, which are exact if they are on every rank."""
        agreed = reduce(Verdicts.unless, ranks.of_all_ranks(self._trainer, measured))
        return replace(measured, training=agreed.training, splitting=agreed.splitting)

    def _exchanges(self, measured: Verdicts, asks: bool) -> bool:
        """Return whether a step ``asks`` other ranks on any rank, and what it gets may matter to the verdict."""
        if not ranks.is_distributed(self._trainer) or ranks.is_sharded(self._trainer):
            return False
        found = ranks.largest_over_ranks(self._trainer, asks) > 0
        return found and measured.training.cause in ("exact", "weighted", "sum")

    def _refuse_to_trim(self, measured: Verdicts, reader: BatchReader, measure: Callable[[], Verdicts]) -> None:
        """Refuse to leave columns of padding out if that alone changes the gradient, on any rank.

        If no sample that was measured had such columns, they are kept in training.
        """
        verdict, sees = measured.training, False
        if verdict.cause not in ("exact", "batch_norm"):
            reader.trims = False
            sees = measure().training.cause == "exact"
            reader.trims = True
        if any(ranks.of_all_ranks(self._trainer, sees)):
            error = "" if verdict.relative_error is None else f" (relative error {verdict.relative_error:.1e})"
            raise UserError(
                "size_of= cuts batches in the step, and this model has another gradient without columns of padding"
                f"{error}: mask the padding in the model and in its loss, or leave size_of= out."
            )
        if reader.trims and not reader.has_trimmed:
            reader.trims = False
            rank_zero_info(
                "size_of= keeps columns of padding: the samples that were measured before training have none, so it is "
                "not known whether the model has the same gradient without them."
            )

    def found_changed(self, former: Mapping[str, float | None]) -> None:
        """Note that not all passes of a window met the same model; whether that matters is measured."""
        self.suspects.update({name: value for name, value in former.items() if name not in self._harmless})

    def found_between_pieces(self, names: tuple[str, ...]) -> None:
        """Note what changes between the pieces of a batch, which is told."""
        self._between_pieces = names
        self.found_changed(dict.fromkeys(names))

    def found(self, measured: Remeasured, *, is_told: bool) -> None:
        """Learn from a measurement on a micro-batch of training, and tell what is wrong unless it is told already."""
        self._harmless.update(self.suspects.keys() - set(measured.matters))
        self.suspects.clear()
        verdicts = (
            found_to_change(measured.verdict or each, measured.matters) for each in (self.training, self.splitting)
        )
        self._learn(*verdicts, is_told=is_told)

    def found_left_out(self) -> None:
        """Learn that the step returned ``None`` for a part of a window."""
        verdict = Exactness(None, rounding(self._trainer), "stateful", reason=LEFT_OUT)
        self.found(Remeasured(verdict), is_told=False)

    def found_unknown(self, reason: str) -> None:
        """Learn that windows cannot be measured, for a reason that is told once."""
        if is_inexact(self.training) or reason in self._unknown or not self._options.verify:
            return
        self._unknown.add(reason)
        self.training = unmeasured(rounding(self._trainer), reason)
        rank_zero_warn(str(self._sentence("training")), category=ExactnessWarning)

    def learn_from_ranks(self) -> None:
        """Learn what other ranks have found on samples of theirs, since it is the first rank that tells."""
        for found in ranks.of_all_ranks(self._trainer, (self.training, self.splitting)):
            self._learn(*(verdict if is_inexact(verdict) else None for verdict in found), is_told=False)

    def _learn(self, training: Exactness | None, splitting: Exactness | None, *, is_told: bool) -> None:
        before = self.training
        self.training, self.splitting = self._after(before, training), self._after(self.splitting, splitting)
        sentence = self._sentence("training")
        if sentence and is_inexact(self.training) and not is_inexact(before) and not is_told:
            self._user_knows = True
            rank_zero_warn(sentence, category=ExactnessWarning)

    def _after(self, known: Exactness | None, verdict: Exactness | None) -> Exactness | None:
        """Return what is known after another measurement: what was once found to be wrong, or unknown, stays so."""
        is_open = known is None or (known.cause == "unmeasured" and known.reason not in self._unknown)
        return verdict or known if is_open or (is_inexact(verdict) and not is_inexact(known)) else known

    def untold(self) -> str | None:
        """Return the sentence on windows that are not exact, once, when the first of several passes begins.

        That may be in a later epoch, if memory ran out meanwhile.
        """
        if self.training is None or self._user_knows:
            return None
        self._user_knows = True
        return self._sentence("model")

    def tell_if_untold(self) -> None:
        """Say it once, as the first batch runs in several passes, if more may come than was planned."""
        if (sentence := self.untold()) is not None:
            rank_zero_warn(sentence, category=ExactnessWarning)

    def _sentence(self, what: str) -> str | None:
        """Say that a model or training is not exact, or not known to be; ``None`` if it is, or if that is accepted."""
        verdict = self.training
        if verdict is not None and verdict.cause == "unmeasured":
            return f"Whether accumulation is exact for this {what} is not known: {verdict}."
        is_accepted = verdict is not None and verdict.cause == "batch_norm" and self._options.batch_norm != "warn"
        is_told = is_inexact(verdict) and not is_accepted
        return f"{_NOT_EXACT[what]}, {verdict}." if is_told else None

    def sentence_on_pieces(self, hooked: str | None) -> str:
        """Say whether a batch in pieces has the gradient of the whole, if a hook had changed a tensor before."""
        self._user_knows |= is_inexact(self.splitting)
        harmful = tuple(name for name in self._between_pieces if name not in self._harmless)
        verdict = splitting_sentence(found_to_change(self.splitting, harmful))
        if hooked is None or hooked in self._harmless:
            return verdict
        sentence = f"A hook had changed {hooked} since the window began; the result may depend on it."
        return sentence if verdict == SAME_RESULT else f"{verdict} {sentence}"


def is_inexact(verdict: Exactness | None) -> bool:
    """Return whether gradients are known to differ from those of one pass."""
    return verdict is not None and verdict.cause in INEXACT
