"""What a step costs, as tables: steps per second by tokens in the batch, and the draft's time by rows. Pure numpy.

A step of B rows that verifies N tokens takes T_draft(B) + T_verify(N); SPS(N) = 1 / that is what the schedulers and the
serving comparison read (section 3.2.2 of the DSpark paper). `dspark.decoding.step_timing` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from dspark.calibration import Floats
from dspark.errors import DsparkError


class SchedulingError(DsparkError):
    """A policy or a cost table cannot be used as given."""


@dataclass(frozen=True)
class CostTable:
    """Measured steps per second against tokens in the verification batch; linear in step time in between.

    Below the first entry the first step time holds; beyond the last one, its time per token. `overhead_seconds` of
    every step, whatever its size (drafting), is added to the time that was read.
    """

    tokens: tuple[int, ...]
    steps_per_second: tuple[float, ...]
    source: str = ""  # where it was measured: device, engine, model
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.steps_per_second):
            raise SchedulingError(
                f"a cost table needs as many speeds as token counts, at least one; got {len(self.tokens)} counts and "
                f"{len(self.steps_per_second)} speeds"
            )
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)) or self.tokens[0] < 1:
            raise SchedulingError(f"token counts of a cost table must ascend from 1 or more; got {list(self.tokens)}")
        if not all(np.isfinite(self.steps_per_second)) or min(self.steps_per_second) <= 0:
            raise SchedulingError("steps per second must be positive, finite numbers")
        if not (np.isfinite(self.overhead_seconds) and self.overhead_seconds >= 0):
            raise SchedulingError(f"overhead_seconds must be 0 or more and finite; got {self.overhead_seconds}")

    @classmethod
    def from_dict(cls, value: Mapping[str, Sequence[float]]) -> CostTable:
        """Read {"tokens": [...], "steps_per_second": [...], "source": "..."}, from wherever it was measured."""
        missing = [key for key in ("tokens", "steps_per_second") if key not in value]
        if missing:
            raise SchedulingError(f"a cost table lacks {', '.join(missing)}; expected tokens and steps_per_second")
        speeds = tuple(float(speed) for speed in value["steps_per_second"])
        return cls(tuple(int(count) for count in value["tokens"]), speeds, str(value.get("source", "")))

    def to_dict(self) -> dict[str, object]:
        return {"tokens": list(self.tokens), "steps_per_second": list(self.steps_per_second), "source": self.source}

    @cached_property
    def _arrays(self) -> tuple[Floats, Floats]:
        """Token counts and step times; schedulers read them in every step."""
        return np.array(self.tokens, dtype=np.float64), 1.0 / np.array(self.steps_per_second)

    def at_rows(self, rows: int) -> CostTable:
        """The table itself: it does not tell rows apart (`dspark.decoding.step_timing.StepCosts` does)."""
        return self

    def without_draft(self) -> CostTable:
        """The table itself, likewise."""
        return self

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Steps per second at these batch sizes (tokens)."""
        wanted = np.asarray(tokens, dtype=np.float64)
        counts, seconds = self._arrays
        time = np.interp(wanted, counts, seconds)
        verified = np.where(wanted > counts[-1], seconds[-1] * wanted / counts[-1], time)
        return np.asarray(1.0 / (verified + self.overhead_seconds))


class Cost(Protocol):
    """Where a scheduler reads what a step costs: a `CostTable`, or one that also knows the draft's time by rows."""

    def at_rows(self, rows: int) -> CostTable:
        """Steps per second against tokens in the batch, for a batch of so many rows that drafts."""

    def without_draft(self) -> CostTable:
        """The same for a step that does not draft."""


@dataclass(frozen=True)
class StepCosts:
    """Step times of one engine, device, target and drafter.

    verify: the target's pass with the acceptance rule, by tokens. draft_seconds: a whole block's draft by rows of the
    batch, linear in between and beyond; empty for a table that was measured elsewhere with the draft in it.
    """

    verify: CostTable
    draft_rows: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.draft_rows) != len(self.draft_seconds):
            raise SchedulingError("step costs need as many draft times as row counts")
        if any(b <= a for a, b in zip(self.draft_rows, self.draft_rows[1:], strict=False)):
            raise SchedulingError(f"row counts of the draft's times must ascend; got {list(self.draft_rows)}")

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> StepCosts:
        """Read {"tokens": [...], "steps_per_second": [...]}, and if there "draft": {"rows": [...], "seconds": [...]}.

        Raises SchedulingError when it is something else.
        """
        draft = value.get("draft") or {}
        rows, seconds = draft.get("rows", ()), draft.get("seconds", ())
        return cls(
            CostTable.from_dict(value),
            tuple(int(count) for count in rows),
            tuple(float(time_) for time_ in seconds),
            dict(value.get("conditions") or {}),
        )

    def to_dict(self) -> dict[str, Any]:
        draft = {"rows": list(self.draft_rows), "seconds": list(self.draft_seconds)}
        return {**self.verify.to_dict(), "draft": draft, "conditions": dict(self.conditions)}

    def draft(self, rows: ArrayLike) -> Floats:
        """Seconds of a block's draft for batches of so many rows."""
        wanted = np.asarray(rows, dtype=np.float64)
        if not self.draft_rows:
            return np.zeros_like(wanted)
        counts, seconds = np.array(self.draft_rows, dtype=np.float64), np.array(self.draft_seconds)
        inside = np.interp(wanted, counts, seconds)
        return np.asarray(np.where(wanted > counts[-1], seconds[-1] * wanted / counts[-1], inside))

    def seconds(self, tokens: ArrayLike, rows: ArrayLike, *, drafting: bool = True) -> Floats:
        """Time of a step of so many rows that verifies so many tokens."""
        verified = 1.0 / self.verify(tokens)
        return np.asarray(verified + self.draft(rows)) if drafting else np.asarray(verified)

    def without_draft(self) -> CostTable:
        """Steps per second by tokens without the draft's time."""
        return self.verify

    def at_rows(self, rows: int) -> CostTable:
        """Steps per second by tokens with the draft's time for so many rows in every step: 1 / `seconds(., rows)`."""
        return _with_draft(self, rows)


@lru_cache(maxsize=4096)
def _with_draft(costs: StepCosts, rows: int) -> CostTable:
    return replace(costs.verify, overhead_seconds=costs.verify.overhead_seconds + float(costs.draft(rows)))
