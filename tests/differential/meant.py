"""Differences from stock Lightning that are meant, each with the sentence of the documentation that says so."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Meant:
    """A difference.

    Attributes:
        scenarios: Regular expression of the scenarios' names.
        modes: Regular expression of the modes' names.
        where: Regular expression of the place in the record.
        reason: Why it is so.
        sentence: What the documentation says of it.
        page: The page that says it.
    """

    scenarios: str
    modes: str
    where: str
    reason: str
    sentence: str
    page: str = "lightning.md"

    def covers(self, scenario: str, mode: str, where: str) -> bool:
        """Whether a difference is this one."""
        found = (self.scenarios, scenario), (self.modes, mode), (self.where, where)
        return all(re.fullmatch(pattern, text) for pattern, text in found)


MEANT: tuple[Meant, ...] = ()
