"""Candidates of an automatic cache: what each codec costs and how far it moves acceptance rates, and the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dspark.decoding.target import TargetError
from dspark.losses.anchors import draw_anchors, loss_mask_of
from dspark.losses.fused_loss import fused_loss, output_head_of
from dspark.losses.losses import LossConfig
from dspark.losses.micro_batch import MicroBatch, make_micro_batch
from dspark.losses.output_head import log_normalizers
from pipelines.stages.capture import read_components, teacher_row
from storage.cache.shards import StoredRow
from storage.codecs.base import Codec, StoredTeacher, TeacherRow
from storage.codecs.fitting import SampleCodecs
from storage.codecs.registry import CodecSpec

if TYPE_CHECKING:
    from pipelines.stages.capture import Conversation
    from pipelines.stages.pilot import PilotWorker

ANCHORS = 16  # of a conversation
TEACHERS = (
    CodecSpec(name="corrected", settings={"step": 0.0625, "top": 8}),
    CodecSpec(name="corrected"),
    CodecSpec(name="corrected", settings={"step": 0.03, "top": 16}),
    CodecSpec(name="recomputed"),
    CodecSpec(name="sparse", settings={"top": 32}),
    CodecSpec(name="sparse", settings={"top": 128}),
    CodecSpec(name="transform", settings={"step": 0.0625}),
    CodecSpec(name="int8"),
    CodecSpec(name="bf16-planes"),
)


def feature_candidates(hidden_size: int, components: int) -> list[CodecSpec]:
    """Projected ones at several widths, then those that serve any drafter."""
    widths = sorted({min(components, round(times * hidden_size)) for times in (1.0, 1.5, 2.0)})
    projected = [CodecSpec(name="projected", settings={"directions": width}) for width in widths]
    transform = [CodecSpec(name="transform", settings={"step": step, "output": "coordinates"}) for step in (0.5, 0.25)]
    return [*projected, *transform, CodecSpec(name="int8"), CodecSpec(name="bf16-planes")]


def choose(
    worker: PilotWorker, conversations: Sequence[Conversation], drafters: Mapping[str, Any], parts: Sequence[str]
) -> dict[str, Any]:
    """Measure the candidates of these parts; `chosen` codecs and the `measured` figures of all of them."""
    section, target = worker.settings.cache, worker.target
    sample = SampleCodecs(
        [teacher_row(row) for row in worker.capture(conversations)],
        layers=len(target.layer_ids),
        hidden_size=target.hidden_size,
        target=worker.parts_for,
        components=read_components(worker.root) if "features" in parts else None,
        temperature=section.temperature,
    )
    comparison, candidates = None, {"teacher": list(TEACHERS)}
    if "features" in parts:
        assert sample.components is not None
        comparison = FeatureComparison(worker, conversations[1::2] or conversations, sample.measuring, drafters)
        candidates["features"] = feature_candidates(sample.hidden_size, len(sample.components["projection"]))
    measured: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}
    for part in parts:
        for spec in candidates[part]:
            try:
                codec = sample.fit(part, spec)
            except TargetError:
                continue  # the target's upper layers do not run alone
            found = sample.measure(part, codec)
            error = comparison.error(codec) if part == "features" and comparison is not None else found["acceptance"]
            measured[part].append({**spec.to_dict(), "bytes_per_token": found["bytes_per_token"], **error})
    chosen = {}
    for part, entries in measured.items():
        # The exact candidate is always among them.
        within = [entry for entry in entries if entry["error"] <= section.acceptance_bound]
        best = min(within, key=lambda entry: entry["bytes_per_token"])
        chosen[part] = {"name": best["name"], "settings": best["settings"]}
    return {"chosen": chosen, "measured": measured}


class FeatureComparison:
    """How far the acceptance rates of the pilots move when they read coded features in place of exact ones.

    They were trained on exact ones; a drafter trained on the coded features has the chance to do better.
    """

    def __init__(
        self,
        worker: PilotWorker,
        conversations: Sequence[Conversation],
        rows: Sequence[TeacherRow],
        drafters: Mapping[str, Any],
    ) -> None:
        self._rows = rows
        self._drafters = drafters
        self._heads = {name: output_head_of(drafter) for name, drafter in drafters.items()}
        self._batches = {name: self._micro_batches(worker, conversations, name) for name in drafters}
        self._exact = {name: self._rates(name, list(batches)) for name, batches in self._batches.items()}

    def error(self, codec: Codec) -> dict[str, float]:
        """`error`: mean over conversations of how far the mean acceptance rate moves; `loss`: of how far it falls.

        The largest of the pilots'.
        """
        found = []
        for name, batches in self._batches.items():
            coded = self._rates(name, [self._recode(batch, codec) for batch in batches])
            moved = self._exact[name] - coded
            found.append((float(moved.abs().mean()), float(moved.mean())))
        error, loss = max(found)
        return {"error": float(f"{error:.4g}"), "loss": float(f"{loss:.4g}")}

    def _micro_batches(
        self, worker: PilotWorker, conversations: Sequence[Conversation], pilot: str
    ) -> list[MicroBatch]:
        batches = []
        for conversation, row in zip(conversations, self._rows, strict=True):
            mask = loss_mask_of(conversation.spans, len(conversation.input_ids))
            anchors = draw_anchors(
                mask,
                ANCHORS,
                seed=worker.settings.run.seed,
                epoch=0,
                sample_id=conversation.sample_id,
                first=self._drafters[pilot].first_anchor,
            )
            if not len(anchors):
                continue
            positions = torch.from_numpy(row.positions)
            sample = StoredRow(
                sample_id=conversation.sample_id,
                input_ids=torch.tensor(conversation.input_ids),
                spans=tuple(conversation.spans),
                hidden_states=row.hidden_states.float(),
                teacher_positions=positions,
                teacher=StoredTeacher(last_hidden_state=row.last_hidden_state[positions].float()),
            )
            batch = make_micro_batch([sample], [anchors], self._drafters[pilot].block_size).to(worker.target.device)
            batch.teacher.log_normalizers = log_normalizers(batch.teacher, self._heads[pilot])
            batches.append(batch)
        return batches

    @torch.no_grad()
    def _rates(self, name: str, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Mean acceptance rate of each conversation."""
        drafter, rates = self._drafters[name], []
        for batch in batches:
            states = drafter.block_states(batch)
            result = fused_loss(drafter, states, batch, LossConfig(confidence=0.0), head=self._heads[name])
            total = sum(value for key, value in result.sums.items() if key.startswith("acceptance@"))
            rates.append(total / max(result.sums["slots"], 1))
        return torch.tensor(rates)

    @staticmethod
    def _recode(batch: MicroBatch, codec: Codec) -> MicroBatch:
        """The batch with its features as a reader of the cache gets them, components turned back into states."""
        device = batch.hidden_states.device
        payload = codec.encode(batch.hidden_states.cpu(), first=True)
        coded = codec.decode(payload, len(batch.hidden_states), dtype=torch.float32)
        if codec.unprojection is not None:
            coded = coded @ codec.unprojection.float().t()
        return replace(batch, hidden_states=coded.to(device))
