"""Reading the conformance folders: a pack of their kept blocks, and the plain loss that made their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.losses.micro_batch import MicroBatch, Teacher, make_micro_batch
from storage.cache.shards import StoredRow

BLOCK_DRAFTERS = (
    "dspark_vanilla",
    "dspark_gated",
    "dspark_rnn",
    "dspark_noconfmarkov",
    "dflash_anchor_first",
    "dspark_gemma4",
    "dspark_gemma4_separate_v",
    "dspark_gemma4_softcap",
)


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}


def spans_of(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def packed(case: dict[str, np.ndarray], block_size: int, **options: Any) -> MicroBatch:
    samples, anchors = [], []
    for row, ids in enumerate(case["input_ids"]):
        samples.append(
            StoredRow(
                sample_id=str(row),
                input_ids=torch.from_numpy(ids.astype(np.int64)),
                spans=spans_of(case["loss_mask"][row]),
                hidden_states=torch.from_numpy(case["target_hidden_states"][row]),
                teacher_positions=torch.arange(len(ids)),
                teacher=Teacher(last_hidden_state=torch.from_numpy(case["target_last_hidden_states"][row])),
            )
        )
        anchors.append(case["anchor_positions"][row][case["block_keep_mask"][row]])
    return make_micro_batch(samples, anchors, block_size, **options)


def draft_logits(drafter: Any, states: Tensor, previous_ids: Tensor) -> Tensor:
    logits = drafter.base_logits(states)
    head = drafter.sequential_head
    return logits if head is None else logits + head.bias(head.bias_vectors(states, previous_ids))


def plain_loss(drafter: Any, states: Tensor, batch: MicroBatch, alphas: tuple[float, float, float]) -> Tensor:
    """All logits at once; the dummies of a padded batch weigh nothing, so a pack without them has the same loss."""
    logits = draft_logits(drafter, states, batch.previous_ids)
    teacher = drafter.base_logits(batch.teacher.last_hidden_state)[batch.teacher_index].softmax(-1)
    weight = batch.loss_mask * torch.exp(-torch.arange(states.shape[1]) / 4.0)
    total = weight.sum() + 1e-6
    log_draft = logits.log_softmax(-1)
    cross_entropy = -log_draft.gather(-1, batch.labels[..., None])[..., 0]
    l1 = (log_draft.exp() - teacher).abs().sum(-1)
    loss = alphas[0] * (cross_entropy * weight).sum() / total + alphas[1] * (l1 * weight).sum() / total
    confidence = drafter.confidence_logits(states, batch.previous_ids)
    if confidence is not None:
        label = (1 - 0.5 * l1).detach()
        bce = torch.nn.functional.binary_cross_entropy_with_logits(confidence, label, reduction="none")
        loss = loss + alphas[2] * (bce * weight).sum() / total
    return loss
