"""What a worker of the cache's build does: run the target over the rows of a work item, encode, write, and audit.

The next forward pass goes on while rows of the one before are encoded and written: one thread runs the target, others
encode, and the calling thread writes. Memory is bounded by a window of rows, whatever the shard's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from safetensors.torch import load

from dspark.decoding.target import Target
from dspark.decoding.target_checks import unknown_token
from dspark.decoding.target_tail import TargetTail
from pipelines.errors import UserError
from pipelines.settings import Settings
from pipelines.target_spec import TargetSpec
from pipelines.workers import open_target
from storage.cache.records import teacher_positions
from storage.cache.target_cache import (
    CachePlan,
    CacheRow,
    Codecs,
    TargetCache,
    create_or_resume,
    encode_row,
    fit_codec,
    load_codecs,
    write_shard,
)
from storage.codecs.base import TargetParts, TeacherRow, as_tensor
from storage.codecs.fitting import fit_teacher
from storage.codecs.measure import recomputed_states, total_variation
from storage.files.filesystems import Folder

COMPONENTS = "components.safetensors"

WINDOW_BATCHES = 4  # budgets of consecutive rows that batches of like length are made from


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One row to capture; `spans` are supervised."""

    sample_id: str
    input_ids: list[int]
    spans: list[tuple[int, int]]
    extra: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CaptureItem:
    """A shard to write (or none, to audit only), and the sample ids whose stored rows are audited if they are there."""

    number: int | None
    rows: tuple[Conversation, ...]
    audit: frozenset[str]

    @property
    def tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    def __str__(self) -> str:
        return "audit" if self.number is None else f"{self.number} ({len(self.rows)} rows)"


@dataclass(frozen=True, kw_only=True)
class FitItem:
    """Rows whose states the codecs are fitted on, for the cache that the plan describes.

    `components`: where the pilot left what a projected codec keeps; `temperature`: of the errors that are measured.
    """

    rows: tuple[Conversation, ...]
    plan: CachePlan
    components: str | None = None
    temperature: float = 1.0


class CaptureWorker:
    """Holds the target; captures, encodes and writes one item after the other."""

    def __init__(self, settings: Settings, spec: TargetSpec, root: str) -> None:
        self.settings, self.spec, self.root = settings, spec, root
        self.target = open_target(settings, spec)
        self._codecs: Codecs | None = None

    def run(self, item: CaptureItem | FitItem) -> dict[str, Any]:
        if isinstance(item, FitItem):
            create_or_resume(self.root, item.plan, lambda: self._fit(item))
            return {}
        record = {"context_bytes": 0, "teacher_bytes": 0}
        if item.number is not None:
            limit = self.settings.cache.max_bytes
            record = write_shard(self.root, item.number, self._encoded(item.rows), max_bytes=limit)
        size = record["context_bytes"] + record["teacher_bytes"]
        return {"bytes_per_token": size / max(item.tokens, 1), "audit": self._audit(item)}

    @property
    def codecs(self) -> Codecs:
        """The cache's codecs."""
        if self._codecs is None:
            self._codecs = load_codecs(self.root)
            if self._codecs.teacher is not None:
                self._codecs.teacher.target = self.parts_for(self._codecs.teacher.name)
        return self._codecs

    def parts_for(self, teacher_codec: str) -> TargetParts:
        """What a codec of the teacher asks of the target."""
        return target_parts(self.target, teacher_codec)

    def _encoded(self, rows: Sequence[Conversation]) -> Iterator[dict[str, Any]]:
        """Rows as the shard's columns, in their order."""
        encode = partial(encode_row, codecs=self.codecs, scope="supervised")
        encoders = max(1, self.settings.cluster.threads_per_worker or int(self.settings.cluster.cpus_per_worker))
        batches = [batch for window in _windows(rows, self._budget) for batch in _batches(window, self._budget)]
        order = iter(rows)
        waiting = next(order, None)
        encoded: dict[str, Future[dict[str, Any]]] = {}
        with ThreadPoolExecutor(1) as forward, ThreadPoolExecutor(encoders) as pool:
            for captured in _one_ahead(forward, self._forward, batches):
                encoded.update((row.sample_id, pool.submit(encode, row)) for row in captured)
                while waiting is not None and waiting.sample_id in encoded:
                    yield encoded.pop(waiting.sample_id).result()
                    waiting = next(order, None)

    @property
    def _budget(self) -> int:
        return self.settings.cache.max_num_batched_tokens

    def _forward(self, batch: Sequence[Conversation]) -> list[CacheRow]:
        """One forward pass; the rows' states stay on the target's device, which may encode them faster."""
        for row in batch:
            if (unknown := unknown_token(self.target, row.input_ids)) is not None:
                raise UserError(f"row {row.sample_id}: {unknown}; take the row out of the conversations")
        longest = max(len(row.input_ids) for row in batch)
        input_ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for index, row in enumerate(batch):
            input_ids[index, : len(row.input_ids)] = torch.tensor(row.input_ids)
            mask[index, : len(row.input_ids)] = 1
        states = self.target.capture(input_ids, mask)
        return [
            CacheRow(
                sample_id=row.sample_id,
                input_ids=row.input_ids,
                spans=row.spans,
                hidden_states=_own(states.hidden_states[index, : len(row.input_ids)]),
                last_hidden_state=_own(states.last_hidden_state[index, : len(row.input_ids)]),
                extra=row.extra,
            )
            for index, row in enumerate(batch)
        ]

    def capture(self, rows: Sequence[Conversation]) -> list[CacheRow]:
        """Exact states of all these rows at once, in their order; of a sample, that is."""
        found = {row.sample_id: row for batch in _batches(rows, self._budget) for row in self._forward(batch)}
        return [found[row.sample_id] for row in rows]

    def _fit(self, item: FitItem) -> Codecs:
        plan, rows = item.plan, self.capture(item.rows)
        tensors = None
        if plan.hidden_states.name == "projected":
            assert item.components is not None
            tensors = read_components(item.components)
        teacher = plan.teacher
        assert teacher is not None
        return Codecs(
            hidden_states=fit_codec(
                plan.hidden_states,
                [(row.hidden_states, True) for row in map(teacher_row, rows)],
                width=plan.num_layers * plan.hidden_size,
                layers=plan.num_layers,
                tensors=tensors,
            ),
            teacher=fit_teacher(
                teacher,
                [teacher_row(row) for row in rows],
                width=plan.hidden_size,
                target=self.parts_for(teacher.name),
                temperature=item.temperature,
            ),
        )

    def _audit(self, item: CaptureItem) -> dict[str, float]:
        """Mean total variation, by sample id, between the stored teacher and the target run over the row alone."""
        chosen = item.audit if item.number is None else item.audit & {row.sample_id for row in item.rows}
        if not chosen:
            return {}
        cache = TargetCache.open(self.root, partial=True)
        found = {}
        for index, sample_id in enumerate(cache.sample_ids):
            if sample_id not in chosen:
                continue
            row = cache.row(index, device=self.target.device, dtype=torch.float32)
            exact = self.target.capture(row.input_ids.long()[None]).last_hidden_state[0, row.teacher_positions]
            assert row.teacher is not None
            assert self.codecs.teacher is not None
            parts = self.codecs.teacher.target
            assert parts is not None
            stored = recomputed_states(row.teacher, row.teacher_positions.numpy(), parts)
            found[sample_id] = float(total_variation(exact, stored, parts, whole_tail=False).mean())
        return found


def target_parts(target: Target, teacher_codec: str) -> TargetParts:
    """What a codec of the teacher asks of the target.

    Raises TargetError when the teacher is to be recomputed and the target's upper layers do not run alone.
    """
    finish = TargetTail(target) if teacher_codec == "recomputed" else None
    return TargetParts(head=target.lm_head.weight.detach(), soft_cap=target.final_logit_softcapping, finish=finish)


def teacher_row(row: CacheRow) -> TeacherRow:
    """A captured row on the CPU, for codecs to be fitted on."""
    assert row.last_hidden_state is not None
    positions = teacher_positions(row.spans, len(row.input_ids))
    return TeacherRow(
        hidden_states=as_tensor(row.hidden_states).cpu(),
        last_hidden_state=as_tensor(row.last_hidden_state).cpu(),
        positions=positions,
    )


def read_components(folder: str) -> dict[str, torch.Tensor]:
    """What a pilot's drafters look at, strongest first: `projection` [K, W] and the `shares` [K] of each component."""
    return load(Folder(folder).read(COMPONENTS))


def _own(states: torch.Tensor) -> torch.Tensor:
    """A row's states as bf16 in memory of their own, so that the batch's can go."""
    return states.to(torch.bfloat16, copy=True)


def _one_ahead(pool: ThreadPoolExecutor, function: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """`function` of every batch in order, the next one computed while the caller works on the last."""
    ahead: Future[Any] | None = None
    for batch in batches:
        ready, ahead = ahead, pool.submit(function, batch)
        if ready is not None:
            yield ready.result()
    if ahead is not None:
        yield ahead.result()


def _windows(rows: Sequence[Conversation], budget: int) -> Iterator[list[Conversation]]:
    """Consecutive rows of about WINDOW_BATCHES batches."""
    window: list[Conversation] = []
    tokens = 0
    for row in rows:
        if window and tokens + len(row.input_ids) > WINDOW_BATCHES * budget:
            yield window
            window, tokens = [], 0
        window.append(row)
        tokens += len(row.input_ids)
    if window:
        yield window


def _batches(rows: Sequence[Conversation], budget: int) -> Iterator[list[Conversation]]:
    """Rows of like length together, at most `budget` tokens a batch with its padding."""
    batch: list[Conversation] = []
    for row in sorted(rows, key=lambda row: len(row.input_ids)):
        if batch and (len(batch) + 1) * len(row.input_ids) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
