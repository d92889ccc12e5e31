"""Differences from stock Lightning that are meant, each with the sentence of the documentation that says so."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Meant:
    """A difference."""

    scenarios: str
    modes: str
    where: str
    reason: str
    sentence: str
    page: str = "concepts/lightning.md"
    ours: str = ""

    def covers(self, scenario: str, mode: str, where: str, ours: str) -> bool:
        """Whether a difference is this one."""
        found = (self.scenarios, scenario), (self.modes, mode), (self.where, where)
        return all(re.fullmatch(pattern, text) for pattern, text in found) and bool(re.search(self.ours, ours))


A_MICRO_BATCH_IS_A_BATCH = "one of them is a batch for every callback and counter."

MEANT = (
    Meant(
        scenarios="ragged_accumulation_of_[23]",
        modes="neutral-.*",
        where=r".*",
        reason="Stock Lightning divides the loss of a last window by the factor, however few batches the window has.",
        sentence="weighs its own mean; stock divides by the factor all the same",
    ),
    Meant(
        scenarios="shuffled_by_a_sampler_of_weights",
        modes="defaults|neutral-.*",
        where=r".*",
        reason="Samplers that draw random numbers do so from seed and epoch, so that a resume finds its place.",
        sentence="in samplers that draw random numbers: a [function of seed and epoch]",
    ),
    Meant(
        scenarios="own_optimizer_step",
        modes="cut-loader",
        where=r"\['events'\].*",
        reason="The first micro-batch of a window zeroes gradients, and the last one steps.",
        sentence=A_MICRO_BATCH_IS_A_BATCH,
    ),
    Meant(
        scenarios="error_in_the_step|interrupted",
        modes="cut-loader",
        where=r".*\['counters'\]\['optimizer'\].*\['ready'\]",
        reason="The error is raised in the first micro-batch of a window, which has no optimizer step.",
        sentence=A_MICRO_BATCH_IS_A_BATCH,
    ),
    Meant(
        scenarios="batch_is_a_dict",
        modes="cut-loader",
        where=r"\['warnings'\]",
        reason="Lightning's warning of a batch of texts names the size of the batch that it saw.",
        sentence=A_MICRO_BATCH_IS_A_BATCH,
        ours=r"ambiguous collection\. The batch size we found is [23]\.|nothing",
    ),
    Meant(
        scenarios="learning_rates_monitored",
        modes="cut-loader|oom-loader",
        where=r"\['rows'\].*",
        reason="The monitor writes in every batch of a logged step, as it does where stock Lightning accumulates.",
        sentence="writes a row for each micro-batch of a step that is logged",
    ),
    Meant(
        scenarios="simple_profiler",
        modes="cut-.*",
        where=r"\['notes'\]\['calls'\].*",
        reason="A profiler counts calls.",
        sentence="counts batches of the recipe; `training_step` counts pieces",
    ),
    Meant(
        scenarios="resumed_.*_of_us_by_stock",
        modes=".*",
        where=r"\['warnings'\]",
        reason="Lightning names the callbacks whose state a checkpoint holds, and which are missing.",
        sentence="so that stock Lightning goes on from it as from its own.",
        ours=r"Please add the following callbacks: .*AutoAccumulate|nothing",
    ),
)
