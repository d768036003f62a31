"""Share of computed block slots that are supervised: packed by work, against padded with dummy anchors.

1. Read token counts and supervised spans from a run's conversations (`conversations/train.jsonl`).
2. Draw anchors and label blocks for several global batches, as training does.
3. Packed: blocks that exist, in micro-batches of a budget. Padded: every sequence has `--anchors` blocks and the length
   of the longest one of those padded together.
4. Print the shares, the tokens computed, and how evenly the micro-batches are filled.

    python benchmarks/micro_batches.py runs/quickstart/conversations/train.jsonl [--anchors 48] [--block-size 7]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from dspark.losses.anchors import draw_anchors, loss_mask_of
from dspark.losses.micro_batch import block_labels, plan_micro_batches, work_of


def read_rows(path: Path, max_length: int) -> list[tuple[str, int, int]]:
    """(sample id, tokens, first supervised token) of rows with an answer."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt, answer = len(row["prompt_ids"]), len(row["response_ids"])
        length = min(prompt + answer, max_length)
        if answer and prompt < length:
            rows.append((str(row["id"]), length, prompt))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("--anchors", type=int, default=48)
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a global batch")
    parser.add_argument("--padded-together", type=int, default=4, help="sequences padded together")
    parser.add_argument("--budget", type=int, default=4096, help="work of a micro-batch")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    rows = read_rows(options.conversations, options.max_length)
    if not rows:
        parser.error(f"{options.conversations} has no row with an answer; run the regenerate stage first")

    supervised = packed_slots = padded_slots = packed_work = padded_work = 0
    fills, groups_made = [], 0
    for epoch in range(options.epochs):
        order = np.random.default_rng(epoch).permutation(len(rows))
        for at in range(0, len(order), options.batch):
            batch = [rows[i] for i in order[at : at + options.batch]]
            lengths, counts = [], []
            for sample_id, length, first in batch:
                mask = loss_mask_of([(first, length)], length)
                chosen = draw_anchors(mask, options.anchors, seed=0, epoch=epoch, sample_id=sample_id)
                labels = block_labels(np.zeros(length, dtype=np.int64), mask, chosen, options.block_size)
                supervised += int(labels.loss_mask.sum())
                lengths.append(int(chosen[-1]) + 1 if len(chosen) else 0)
                counts.append(len(chosen))
            groups = plan_micro_batches(lengths, counts, block_size=options.block_size, max_tokens=options.budget)
            loads = [sum(work_of(lengths[i], counts[i], options.block_size) for i in group) for group in groups]
            fills += [load / max(loads) for load in loads]
            groups_made += len(groups)
            packed_slots += sum(counts) * options.block_size
            packed_work += sum(loads)
            padded_slots += len(batch) * options.anchors * options.block_size
            for start in range(0, len(batch), options.padded_together):
                part = [length for _, length, _ in batch[start : start + options.padded_together]]
                padded_work += work_of(max(part) * len(part), len(part) * options.anchors, options.block_size)

    answers = [length - first for _, length, first in rows]
    print(
        f"{len(rows)} sequences, answers of {min(answers)}-{max(answers)} tokens (median {np.median(answers):.0f}), "
        f"at most {options.anchors} anchors, block size {options.block_size}, {groups_made} micro-batches"
    )
    print("| way | slots computed | supervised share | context tokens + slots |")
    print("| --- | --- | --- | --- |")
    print(f"| packed | {packed_slots} | {supervised / packed_slots:.1%} | {packed_work} |")
    print(f"| padded with dummy anchors | {padded_slots} | {supervised / padded_slots:.1%} | {padded_work} |")
    print(f"A micro-batch's work is on average {np.mean(fills):.1%} of the largest in its global batch.")


if __name__ == "__main__":
    main()
