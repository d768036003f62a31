"""Share of computed block slots that are supervised: packed by work, against padded with dummy anchors.

1. Read token counts and supervised spans from a run's conversations (`conversations/train.jsonl`).
2. Draw anchors and label blocks for several global batches, as training does.
3. Packed: blocks that exist, in packs of a budget. Padded: every sequence has `--anchors` blocks and the length of the
   longest one of its micro-batch.
4. Print the shares, the tokens computed, and how evenly the packs are filled.

    python benchmarks/packing.py runs/quickstart/conversations/train.jsonl [--anchors 48] [--block-size 7]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from dspark.anchors import block_labels, draw_anchors, supervised_mask
from dspark.packing import plan_packs, work_of


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
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences padded together")
    parser.add_argument("--budget", type=int, default=4096, help="work of a pack")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    rows = read_rows(options.conversations, options.max_length)
    if not rows:
        parser.error(f"{options.conversations} has no row with an answer; run the regenerate stage first")

    supervised = packed_slots = padded_slots = packed_work = padded_work = 0
    fills, packs_made = [], 0
    for epoch in range(options.epochs):
        order = np.random.default_rng(epoch).permutation(len(rows))
        for at in range(0, len(order), options.batch):
            batch = [rows[i] for i in order[at : at + options.batch]]
            lengths, counts = [], []
            for sample_id, length, first in batch:
                mask = supervised_mask([(first, length)], length)
                chosen = draw_anchors(mask, options.anchors, seed=0, epoch=epoch, sample_id=sample_id)
                labels = block_labels(np.zeros(length, dtype=np.int64), mask, chosen, options.block_size)
                supervised += int(labels.supervised.sum())
                lengths.append(int(chosen[-1]) + 1 if len(chosen) else 0)
                counts.append(len(chosen))
            packs = plan_packs(lengths, counts, block_size=options.block_size, budget=options.budget)
            loads = [sum(work_of(lengths[i], counts[i], options.block_size) for i in pack) for pack in packs]
            fills += [load / max(loads) for load in loads]
            packs_made += len(packs)
            packed_slots += sum(counts) * options.block_size
            packed_work += sum(loads)
            padded_slots += len(batch) * options.anchors * options.block_size
            for start in range(0, len(batch), options.micro_batch):
                part = [length for _, length, _ in batch[start : start + options.micro_batch]]
                padded_work += work_of(max(part) * len(part), len(part) * options.anchors, options.block_size)

    answers = [length - first for _, length, first in rows]
    print(
        f"{len(rows)} sequences, answers of {min(answers)}-{max(answers)} tokens (median {np.median(answers):.0f}), "
        f"at most {options.anchors} anchors, block size {options.block_size}, {packs_made} packs"
    )
    print("| way | slots computed | supervised share | context tokens + slots |")
    print("| --- | --- | --- | --- |")
    print(f"| packed | {packed_slots} | {supervised / packed_slots:.1%} | {packed_work} |")
    print(f"| padded with dummy anchors | {padded_slots} | {supervised / padded_slots:.1%} | {padded_work} |")
    print(f"A pack's work is on average {np.mean(fills):.1%} of the largest in its global batch.")


if __name__ == "__main__":
    main()
