"""How many drafts of each row to verify. Pure numpy; no policy looks at a token that it decides about.

B rows (R in the paper), G slots. survival [B, G] is a_{r,j}, non-increasing along G. Verifying lengths l_r costs
Σ(1 + l_r) tokens in the batch and yields Σ(1 + Σ_{j<=l_r} a_{r,j}) tokens in expectation; with SPS the steps per
second at that many tokens, throughput is their product (section 3.2.2 of the DSpark paper).

Non-anticipating: slot j's admission may depend on confidences 1..j, which know the tokens before j, and on other
rows, but not on the token at j or on anything computed from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.calibration import Floats
from dspark.decoding.step_costs import Cost, CostTable, SchedulingError

__all__ = ["CostTable", "LengthPolicy", "SchedulingError", "algorithm_1", "global_search", "policy_named", "top_k"]

Lengths = NDArray[np.int64]


def _ranked(survival: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Rows of all slots by descending survival, and those survivals. Ties go to the earlier slot, then row."""
    rows, slots = survival.shape
    # Slot-major, so that a stable sort breaks ties by slot and prefixes stay prefixes.
    flat = np.ascontiguousarray(survival.T).ravel()
    order = np.argsort(-flat, kind="stable")
    return np.tile(np.arange(rows), slots)[order], flat[order]


def throughput_curve(survival: Floats, cost: CostTable) -> tuple[NDArray[np.int64], Floats]:
    """Rows in order of admission, and Θ after 0, 1, 2, ... admissions (one entry more)."""
    owners, chances = _ranked(survival)
    rows = survival.shape[0]
    expected = rows + np.concatenate([[0.0], np.cumsum(chances)])
    return owners, expected * cost(rows + np.arange(len(expected)))


def algorithm_1(survival: ArrayLike, cost: CostTable) -> Lengths:
    """The paper's Algorithm 1: admit by descending survival while throughput rises, stop at the first that does not.

    Gives lengths [B]. The early stop keeps it non-anticipating; it is optimal where throughput is unimodal.
    """
    chances = _checked(survival)
    owners, theta = throughput_curve(chances, cost)
    falls = np.flatnonzero(theta[1:] <= theta[:-1])
    admitted = int(falls[0]) if len(falls) else len(owners)
    return np.bincount(owners[:admitted], minlength=chances.shape[0]).astype(np.int64)


def global_search(survival: ArrayLike, cost: CostTable) -> Lengths:
    """The best prefix of the same order, over the whole curve.

    Anticipating when used on the confidences of the very drafts it schedules (Appendix A): for capacities from earlier
    steps, and for comparison, only.
    """
    chances = _checked(survival)
    owners, theta = throughput_curve(chances, cost)
    return np.bincount(owners[: int(theta.argmax())], minlength=chances.shape[0]).astype(np.int64)


def top_k(survival: ArrayLike, capacity: int) -> Lengths:
    """Admit the `capacity` slots of highest survival. Lengths [B]."""
    chances = _checked(survival)
    owners, _ = _ranked(chances)
    return np.bincount(owners[: max(capacity, 0)], minlength=chances.shape[0]).astype(np.int64)


def threshold(chances: ArrayLike, level: float) -> Lengths:
    """Each row's slots before the first whose chance [B, G] is below `level`."""
    below = np.asarray(chances, dtype=np.float64) < level
    return np.where(below.any(-1), below.argmax(-1), below.shape[-1]).astype(np.int64)


def _checked(survival: ArrayLike) -> Floats:
    chances = np.asarray(survival, dtype=np.float64)
    if chances.ndim != 2 or not np.isfinite(chances).all():
        raise SchedulingError(f"survival must be finite and [rows, slots]; got shape {chances.shape}")
    return np.minimum.accumulate(chances, axis=-1) if chances.size else chances


class LengthPolicy(ABC):
    """Chooses verification lengths for a step. `lengths` may keep state between steps; `reset` clears it."""

    name: ClassVar[str]
    needs_confidence: ClassVar[bool] = False

    def most(self, block_size: int) -> int:
        """The most slots it will ever verify: no more need to be drafted."""
        return block_size

    def wants_draft(self, rows: int) -> bool:
        """Asked once a step, before it: whether its rows are to draft at all."""
        return True

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


class StaticLength(LengthPolicy):
    """Verify the first `length` drafts of every row; 0 is plain decoding, 1 the one-slot baseline."""

    name = "static"

    def __init__(self, length: int) -> None:
        if length < 0:
            raise SchedulingError(f"a static verification length is {length}; expected 0 or more")
        self.length = length

    def most(self, block_size: int) -> int:
        return min(self.length, block_size)

    def lengths(self, survival: Floats | None, rows: int, slots: int) -> Lengths:
        return np.full(rows, min(self.length, slots), dtype=np.int64)


class Threshold(LengthPolicy):
    """Verify up to the first slot whose confidence falls below `level`."""

    name = "threshold"
    needs_confidence = True

    def __init__(self, level: float) -> None:
        if not 0 <= level <= 1:
            raise SchedulingError(f"a confidence threshold is {level}; expected 0 to 1")
        self.level = level

    def lengths(self, survival: Floats | None, rows: int, slots: int) -> Lengths:
        assert survival is not None
        before = np.concatenate([np.ones((rows, 1)), survival[:, :-1]], axis=1)
        return threshold(np.divide(survival, before, out=np.zeros_like(survival), where=before > 0), self.level)


class _CostPolicy(LengthPolicy):
    """What both schedulers share: a cost table, and the choice not to draft where a step without a draft pays better.

    By the time confidences are known, the draft's time is spent. Whether to spend it is therefore decided before the
    step, from the confidences of the last one that drafted; while it does not pay, every `probe`-th step drafts anyway,
    to see whether it does by now.
    """

    needs_confidence = True

    def __init__(self, cost: Cost, probe: int = 16) -> None:
        if probe < 1:
            raise SchedulingError(f"a scheduler drafts every {probe}-th step at least; expected 1 or more")
        self.cost, self.probe = cost, probe
        self._seen: Floats | None = None
        self._pause = 0

    def reset(self) -> None:
        self._seen, self._pause = None, 0

    def wants_draft(self, rows: int) -> bool:
        if self._seen is None:
            return True
        if self._pause:
            self._pause -= 1
            return self._pause == 0
        if drafting_pays(self._seen, self.cost, rows):
            return True
        self._pause = self.probe - 1
        return self._pause == 0

    def lengths(self, survival: Floats | None, rows: int, slots: int) -> Lengths:
        assert survival is not None
        self._seen = survival
        return self._choose(survival, rows)

    @abstractmethod
    def _choose(self, survival: Floats, rows: int) -> Lengths:
        """Lengths [B] from survival [B, G]."""


def drafting_pays(past: Floats, cost: Cost, rows: int) -> bool:
    """Whether `rows` rows are expected to gain by drafting, judged by an earlier step's survivals [B', G].

    Compares the best Θ with the draft's time in the step with that of one token a row without it. Earlier rows stand
    for the present ones, in turn, where there are fewer or more of them.
    """
    _, theta = throughput_curve(past[np.arange(rows) % len(past)], cost.at_rows(rows))
    return bool(theta.max() > rows * float(cost.without_draft()(rows)))


class Scheduler(_CostPolicy):
    """Algorithm 1 over a measured cost table."""

    name = "scheduler"

    def _choose(self, survival: Floats, rows: int) -> Lengths:
        return algorithm_1(survival, self.cost.at_rows(rows))


class TwoStepsBehind(_CostPolicy):
    """The production variant: capacity by global search on the confidences of two steps ago, filled by present ones.

    The capacity is a number of draft tokens a row, so that rows coming and going between the steps do not matter much.
    Until two steps have passed it is Algorithm 1.
    """

    name = "two-steps-behind"

    def __init__(self, cost: Cost, delay: int = 2, probe: int = 16) -> None:
        super().__init__(cost, probe)
        if delay < 1:
            raise SchedulingError(f"the capacity's delay is {delay}; 0 would let drafts decide on themselves")
        self.delay = delay
        self._past: deque[Floats] = deque(maxlen=delay)

    def reset(self) -> None:
        super().reset()
        self._past.clear()

    def _choose(self, survival: Floats, rows: int) -> Lengths:
        if len(self._past) < self.delay:
            chosen = algorithm_1(survival, self.cost.at_rows(rows))
        else:
            past = self._past[0]
            chosen = top_k(survival, two_steps_capacity(past, self.cost.at_rows(len(past)), rows))
        self._past.append(survival)
        return chosen


def two_steps_capacity(past: Floats, cost: CostTable, rows: int) -> int:
    """Draft tokens that `rows` rows may verify together, judged by earlier survivals [B', G]."""
    return round(int(global_search(past, cost).sum()) * rows / len(past))


def policy_named(
    name: str, *, length: int | None = None, level: float | None = None, cost: Cost | None = None
) -> LengthPolicy:
    """The policy of this name: "full", "static" (`length`), "threshold" (`level`), "scheduler" or "two-steps-behind".

    Raises SchedulingError for another name, or when what the policy decides by is missing.
    """
    wanted = {"static": ("length", length), "threshold": ("level", level), "scheduler": ("cost", cost)}
    wanted["two-steps-behind"] = wanted["scheduler"]
    if name in wanted and wanted[name][1] is None:
        raise SchedulingError(f"the length policy {name!r} needs a {wanted[name][0]}")
    if name == "full":
        return FullBlock()
    if name == "static":
        return StaticLength(length or 0)
    if name == "threshold":
        return Threshold(level or 0.0)
    if name in ("scheduler", "two-steps-behind"):
        assert cost is not None
        return Scheduler(cost) if name == "scheduler" else TwoStepsBehind(cost)
    raise SchedulingError(f"there is no length policy {name!r}; there are full, {', '.join(wanted)}")
