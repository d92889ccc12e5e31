"""Learning rates and Adam's β₂ that follow the effective batch. Pure."""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

ScaleLr = Literal["none", "linear", "sqrt"]


@dataclass(frozen=True, slots=True)
class RateRule:
    """How a larger batch than the recipe's changes learning rate and β₂."""

    scale_lr: ScaleLr = "none"  # Goyal et al., arXiv 1706.02677; Malladi et al., arXiv 2205.10287
    scale_beta2: bool = False  # Marek et al., arXiv 2507.07101, equation 3: the half-life stays the same in samples

    def factor(self, batch: int, recipe: int) -> float:
        """Return by what the learning rate is multiplied.

        Examples:
            >>> RateRule("sqrt").factor(1024, 256)
            2.0
        """
        ratio = batch / recipe
        return ratio if self.scale_lr == "linear" else sqrt(ratio) if self.scale_lr == "sqrt" else 1.0

    def beta2(self, beta2: float, batch: int, recipe: int) -> float:
        """Return the β₂ whose half-life is as many samples."""
        return float(beta2 ** (batch / recipe)) if self.scale_beta2 else beta2
