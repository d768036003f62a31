"""Batched, lossless decoding of any target with any proposer, or with none.

One step of the batch: propose (draft tokens, their distributions, confidences), choose verification lengths, verify
all rows in one target pass, accept, commit, hand the committed states back to the proposer.

B live rows, N tokens of a pass, G block slots, V vocabulary, m captured layers, d hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.calibration import survival
from dspark.decoding.kv_cache import RaggedCache, RaggedStep, ragged_forward
from dspark.decoding.proposers import Committed, Proposal, Proposer, proposer_for
from dspark.decoding.rounds import Commit, Completion, FinishReason, Request, RoundEvent, commit
from dspark.decoding.sampling import (
    NonFiniteLogits,
    Purpose,
    SamplingConfig,
    Verdict,
    require_finite,
    sample,
    uniforms,
    verify,
)
from dspark.decoding.scheduling import FullBlock, LengthPolicy
from dspark.decoding.target_checks import unknown_token
from dspark.errors import DsparkError

__all__ = ["Completion", "Decoder", "Request", "RequestError", "RoundEvent", "SamplingConfig"]


class RequestError(DsparkError):
    """A request cannot be decoded as it stands; the message names it."""


@dataclass
class _Row:
    """A live request. `length` tokens have keys and values; the anchor, the last committed token, has none yet."""

    request: Request
    began: float
    length: int = 0
    output: list[int] = field(default_factory=list)
    rounds: list[RoundEvent] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def room(self) -> int:
        return self.request.max_new_tokens - len(self.output)


class Decoder:
    """Decodes requests with continuous filling: a finished row's place goes to the next request at once.

    drafter: a drafter module, a `Proposer`, or None for plain decoding. length_policy: how many drafts of each row
    are verified (`scheduling`). temperatures [G] and shifts [G] calibrate the confidence logits. record_gaps
    keeps the difference of the two highest target logits at every output token.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
        *,
        sampling: SamplingConfig | None = None,
        max_rows: int = 16,
        max_length: int | None = None,
        length_policy: LengthPolicy | None = None,
        temperatures: Sequence[float] | None = None,
        shifts: Sequence[float] | None = None,
        record_gaps: bool = False,
        prefill_tokens: int = 2048,
    ) -> None:
        if max_rows < 1:
            raise RequestError(f"max_rows is {max_rows}; expected 1 or more")
        self.target = target
        self.proposer: Proposer | None = None if drafter is None else proposer_for(drafter, target)
        self.sampling = sampling or SamplingConfig()
        self.max_rows, self.max_length = max_rows, max_length
        self.policy: LengthPolicy = length_policy or FullBlock()
        self.temperatures = None if temperatures is None else np.asarray(temperatures, dtype=np.float64)
        self.shifts = None if shifts is None else np.asarray(shifts, dtype=np.float64)
        self.record_gaps = record_gaps
        self.prefill_tokens = prefill_tokens
        self.block_size = 0 if self.proposer is None else self.proposer.block_size
        for name, table in (("temperatures", self.temperatures), ("shifts", self.shifts)):
            if table is not None and self.block_size and len(table) != self.block_size:
                raise RequestError(
                    f"{len(table)} calibrated {name} were given for a drafter of block {self.block_size}"
                )
        if self.proposer is not None and self.policy.needs_confidence and not self.proposer.has_confidence:
            raise RequestError(
                f"the length policy {self.policy.name!r} reads confidences, and this drafter has no confidence head "
                "(choose a static length or the full block)"
            )
        # Logits beyond the tokenizer's ids say nothing that could be read on; such a token ends the answer.
        self._no_tokens = frozenset(range(target.input_vocab_size, target.vocab_size))
        self._cache: RaggedCache | None = None
        self._rows: list[_Row] = []
        self._update_seconds = 0.0  # of the last step, counted as the next one's drafting

    def why_not(self, request: Request) -> str | None:
        """Why a request cannot be decoded, or None when it can."""
        if not request.prompt_ids:
            return f"request {request.request_id!r} has an empty prompt"
        if request.max_new_tokens < 1:
            return f"request {request.request_id!r} asks for {request.max_new_tokens} new tokens; expected 1 or more"
        if (unknown := unknown_token(self.target, request.prompt_ids)) is not None:
            return f"request {request.request_id!r}: {unknown}"
        needed = len(request.prompt_ids) + request.max_new_tokens
        limits = (("the target's context", self.target.context_length), ("`max_length`", self.max_length))
        for name, bound in limits:
            if bound is not None and needed > bound:
                return (
                    f"request {request.request_id!r} needs {len(request.prompt_ids)} prompt + {request.max_new_tokens} "
                    f"new tokens; {name} is {bound}"
                )
        return None

    def generate(
        self, requests: Iterable[Request], on_round: Callable[[str, RoundEvent], None] | None = None
    ) -> Iterator[Completion]:
        """Yield completions as rows finish (not in the order of the requests).

        on_round(request_id, event) is called after every round of every row. Raises RequestError before any work when a
        request cannot be decoded; `why_not` tells beforehand.
        """
        waiting = deque(requests)
        for request in waiting:
            if (why := self.why_not(request)) is not None:
                raise RequestError(why)
        if not waiting:
            return
        longest = max(len(request.prompt_ids) + request.max_new_tokens for request in waiting)
        self._open(min(self.max_rows, len(waiting)), longest + self.block_size + 1)
        self.policy.reset()
        self._rows, self._update_seconds = [], 0.0
        while waiting or self._rows:
            new = [_Row(waiting.popleft(), time.perf_counter()) for _ in range(self._free(len(waiting)))]
            if new:
                self._prefill(new)
                yield from self._retire()
            if self._rows:
                self._round(on_round)
                yield from self._retire()

    def _free(self, waiting: int) -> int:
        return min(waiting, self.max_rows - len(self._rows))

    def _open(self, rows: int, capacity: int) -> None:
        cache = self._cache
        if cache is None or cache.rows < rows or cache.capacity < capacity:
            self._cache = RaggedCache(self.target.num_layers, rows, capacity)
        if self.proposer is not None:
            self.proposer.open(rows, capacity)

    def _forward(self, step: RaggedStep, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self._cache is not None
        hidden_states = self.proposer is not None and self.proposer.needs_hidden_states
        return ragged_forward(self.target, self._cache, step, tokens, hidden_states=hidden_states)

    @torch.inference_mode()
    def _prefill(self, new: list[_Row]) -> None:
        """Read prompts, several in one pass, and commit each one's first token."""
        while new:
            batch = [new.pop(0)]
            total = len(batch[0].request.prompt_ids)
            while new and total + len(new[0].request.prompt_ids) <= self.prefill_tokens:
                total += len(new[0].request.prompt_ids)
                batch.append(new.pop(0))
            first_row = len(self._rows)
            rows = list(range(first_row, first_row + len(batch)))
            counts = [len(row.request.prompt_ids) for row in batch]
            step = RaggedStep(rows, [0] * len(batch), counts, self.target.device)
            tokens = torch.tensor([token for row in batch for token in row.request.prompt_ids])
            last, hidden_states = self._forward(step, tokens.to(self.target.device))
            ends = torch.tensor(counts).cumsum(0).to(last.device) - 1
            logits = self.target.logits(last[ends])
            self._require_finite(logits, [(row, 0) for row in batch])
            first = sample(logits, self.sampling, self._uniforms(batch, [0] * len(batch), Purpose.TARGET)).tolist()
            gaps = self._gaps(logits)
            for index, row in enumerate(batch):
                row.length = counts[index]
                result = commit([], first[index], row.request.stop_token_ids | self._no_tokens, row.room)
                self._append(row, result, gaps[index : index + 1])
            self._rows.extend(batch)
            if self.proposer is not None:
                self.proposer.extend(
                    Committed(rows, [0] * len(batch), counts, hidden_states, tokens.to(last.device), first)
                )

    @torch.inference_mode()
    def _round(self, on_round: Callable[[str, RoundEvent], None] | None) -> None:
        rows, device = self._rows, self.target.device
        clock = time.perf_counter() - self._update_seconds
        anchors = [row.output[-1] for row in rows]
        slots = min(self.policy.most(self.block_size), self.block_size) if self.policy.wants_draft(len(rows)) else 0
        proposal = self._propose(anchors, slots)
        lengths = np.zeros(len(rows), dtype=np.int64)
        confidences = None
        if proposal is not None:
            confidences = (
                None if proposal.confidence_logits is None else proposal.confidence_logits.float().cpu().numpy()
            )
            chances = None if confidences is None else survival(confidences, self.temperatures, self.shifts)
            lengths = self.policy.lengths(chances, len(rows), slots)
        drafted = time.perf_counter()
        counts = [1 + int(length) for length in lengths]
        step = RaggedStep(range(len(rows)), [row.length for row in rows], counts, device)
        anchor_ids = torch.tensor(anchors, device=device)
        drafts = (
            torch.zeros(len(rows), 0, dtype=torch.long, device=device)
            if proposal is None
            else proposal.token_ids.to(device)
        )
        tokens = torch.cat([torch.cat([anchor_ids[i : i + 1], drafts[i, : lengths[i]]]) for i in range(len(rows))])
        last, hidden_states = self._forward(step, tokens)
        logits = self.target.logits(last)
        self._require_finite(
            logits, [(row, at) for row, count in zip(rows, counts, strict=True) for at in range(count)]
        )
        verdict = self._verify(step, logits, proposal, lengths)
        gaps = self._gaps(logits)
        verified = time.perf_counter()
        timing = ((drafted - clock) * 1e3, (verified - drafted) * 1e3)
        kept = []
        for index, row in enumerate(rows):
            accepted = verdict.accepted[index]
            ends = row.request.stop_token_ids | self._no_tokens
            result = commit(verdict.draft_ids[index][:accepted], verdict.next_ids[index], ends, row.room)
            if self.proposer is not None:
                event = _event(
                    row, anchors[index], index, verdict, confidences, int(lengths[index]), result, timing, step
                )
                row.rounds.append(event)
                if on_round is not None:
                    on_round(row.request.request_id, event)
            kept.append(1 + result.drafts_kept)
            first = step.first_tokens[index]
            self._append(row, result, gaps[first : first + len(result.token_ids)])
        if self.proposer is not None:
            begin = time.perf_counter()
            self._give_back(step, tokens, hidden_states, kept)
            self._update_seconds = time.perf_counter() - begin
        for row, count in zip(rows, kept, strict=True):
            row.length += count

    def _propose(self, anchors: list[int], slots: int) -> Proposal | None:
        if self.proposer is None or slots == 0:
            return None
        rows = self._rows
        draws = None
        if not self.sampling.greedy:
            draws = torch.stack([self._uniforms(rows, slot, Purpose.DRAFT) for slot in range(slots)], dim=1)
        try:
            return self.proposer.propose(anchors, [row.length for row in rows], slots, self.sampling, draws)
        except NonFiniteLogits as error:
            raise RequestError(_not_finite("the drafter", rows[error.row], 0)) from error

    def _require_finite(self, logits: Tensor, places: Sequence[tuple[_Row, int]]) -> None:
        """Raises RequestError naming the request and the place, as (row, output tokens after those it has)."""
        try:
            require_finite(logits)
        except NonFiniteLogits as error:
            raise RequestError(_not_finite("the target", *places[error.row])) from error

    def _verify(self, step: RaggedStep, logits: Tensor, proposal: Proposal | None, lengths: np.ndarray) -> Verdict:
        rows = self._rows
        accept = residual = None
        if not self.sampling.greedy:
            columns = range(step.width)
            accept = torch.stack([self._uniforms(rows, slot, Purpose.ACCEPT) for slot in columns], dim=1)
            residual = torch.stack([self._uniforms(rows, slot, Purpose.TARGET) for slot in columns], dim=1)
        drafts = torch.zeros(len(rows), 0, dtype=torch.long) if proposal is None else proposal.token_ids
        return verify(
            step.padded(logits),
            drafts.to(logits.device),
            None if proposal is None else proposal.probs,
            torch.from_numpy(lengths).to(logits.device),
            self.sampling,
            accept,
            residual,
        )

    def _uniforms(self, rows: list[_Row], offset: int | list[int], purpose: Purpose) -> Tensor:
        """One number a row for the output token at `offset` after those it has."""
        starts = np.array([len(row.output) for row in rows])
        seeds = np.array([row.request.seed for row in rows])
        return torch.from_numpy(uniforms(seeds, starts + np.asarray(offset), starts, purpose)).to(self.target.device)

    def _gaps(self, logits: Tensor) -> list[float]:
        if not self.record_gaps:
            return []
        top = logits.float().topk(2, dim=-1).values
        return (top[:, 0] - top[:, 1]).tolist()

    def _append(self, row: _Row, result: Commit, gaps: list[float]) -> None:
        row.output.extend(result.token_ids)
        row.gaps.extend(gaps)
        row.reason = result.finish_reason

    def _give_back(self, step: RaggedStep, tokens: Tensor, hidden_states: Tensor | None, kept: list[int]) -> None:
        """Tell the proposer about the anchor and the accepted drafts, whose target states now exist."""
        assert self.proposer is not None
        live = [index for index, row in enumerate(self._rows) if row.reason is None]
        if not live:
            return
        chosen = torch.cat([torch.arange(kept[index]) + step.first_tokens[index] for index in live]).to(tokens.device)
        self.proposer.extend(
            Committed(
                live,
                [step.starts[index] for index in live],
                [kept[index] for index in live],
                None if hidden_states is None else hidden_states[chosen],
                tokens[chosen],
                [self._rows[index].output[-1] for index in live],
            )
        )

    def _retire(self) -> Iterator[Completion]:
        """Yield finished rows and keep the live ones at the front of the storage."""
        finished = [index for index, row in enumerate(self._rows) if row.reason is not None]
        done = [self._rows[index] for index in finished]
        for index in reversed(finished):
            last = self._rows.pop()
            if index < len(self._rows):
                self._rows[index] = last
                self._move(len(self._rows), index, last.length)
        now = time.perf_counter()
        for row in done:
            assert row.reason is not None
            yield Completion(
                request_id=row.request.request_id,
                prompt_ids=list(row.request.prompt_ids),
                output_ids=row.output,
                finish_reason=row.reason,
                rounds=row.rounds,
                seconds=now - row.began,
                logit_gaps=row.gaps,
            )

    @torch.inference_mode()
    def _move(self, source: int, to: int, length: int) -> None:
        assert self._cache is not None
        self._cache.move_row(source, to, length)
        if self.proposer is not None:
            self.proposer.move_row(source, to)


def _not_finite(whose: str, row: _Row, after: int) -> str:
    at = len(row.output) + after
    return (
        f"request {row.request.request_id!r}: {whose}'s logits for token {at} of its answer (position "
        f"{len(row.request.prompt_ids) + at}) are not finite; its weights are damaged, or overflow in this precision: "
        "try target.dtype=bfloat16 or float32"
    )


def _event(
    row: _Row,
    anchor: int,
    index: int,
    verdict: Verdict,
    confidences: np.ndarray | None,
    scheduled: int,
    result: Commit,
    timing: tuple[float, float],
    step: RaggedStep,
) -> RoundEvent:
    drafts = verdict.draft_ids[index]
    accepted = verdict.accepted[index]
    # What the rule said about tokens after a stop token concerns no text that anyone will see.
    reached = min(accepted + 1, scheduled, result.drafts_kept if result.stop_cut else scheduled)
    return RoundEvent(
        round=len(row.rounds),
        position=len(row.output),
        anchor_id=anchor,
        draft_ids=drafts,
        proposed=len(drafts),
        scheduled=scheduled,
        accepted_raw=accepted,
        committed=len(result.token_ids),
        bonus=result.bonus,
        stop_cut=result.stop_cut,
        confidence_logits=[] if confidences is None else confidences[index].tolist(),
        accepted=[slot < min(accepted, reached) for slot in range(scheduled)],
        reached=[slot < reached for slot in range(scheduled)],
        acceptance_rate=[rate if slot < reached else 0.0 for slot, rate in enumerate(verdict.rates[index][:scheduled])],
        committed_ids=list(result.token_ids),
        draft_ms=timing[0],
        verify_ms=timing[1],
        batch_rows=len(step.rows),
        batch_tokens=step.num_tokens,
    )
