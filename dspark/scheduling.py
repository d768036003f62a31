"""How many drafts of each row to verify. Pure numpy; no policy may look at a token that it decides about.

B rows (R in the paper), G slots. survival [B, G] is a_{r,j}, non-increasing along G.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dspark.calibration import Floats

Lengths = NDArray[np.int64]


class SchedulingError(ValueError):
    """A policy or a cost table cannot be used as given."""


class LengthPolicy(ABC):
    """Chooses verification lengths for a step. `lengths` may keep state between steps; `reset` clears it."""

    name: ClassVar[str]
    needs_confidence: ClassVar[bool] = False

    def most(self, block_size: int) -> int:
        """The most slots it will ever verify: no more need to be drafted."""
        return block_size

    @abstractmethod
    def lengths(self, survival: Floats | None, rows: int, slots: int) -> Lengths:
        """Lengths [B] in 0..slots from survival [B, slots] (None without confidences)."""

    def reset(self) -> None:  # noqa: B027 - most policies keep nothing
        """Forget earlier steps."""


class FullBlock(LengthPolicy):
    """Verify everything that was drafted."""

    name = "full"

    def lengths(self, survival: Floats | None, rows: int, slots: int) -> Lengths:
        return np.full(rows, slots, dtype=np.int64)
