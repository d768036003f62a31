"""Time and extra memory of the fused loss against the plain way, on this machine.

1. Make packed batches of random states: sequences, anchors, slots, vocabulary as the case says.
2. Run forward and backward of each way in a process of its own, several times.
3. Print a table: seconds (best and median), supervised slots per second, peak memory above what the inputs take.

The plain way has the logits of all slots at once, separate softmaxes for the loss and for the acceptance rate, and the
target's logits projected for every slot.

    python benchmarks/loss.py [--case paper-shape|reduced|wide|small] [--repeats 3] [--threads 2] [--chunks 256,512]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    sequences: int
    anchors: int
    vocabulary: int
    draft_vocabulary: int | None = None
    rank: int = 256
    hidden: int = 576
    slots: int = 7
    prompt_tokens: int = 56
    answer_tokens: int = 200
    ways: tuple[str, ...] = ("plain", "fused")


CASES = {
    case.name: case
    for case in (
        Case(name="small", sequences=1, anchors=64, vocabulary=49_152),
        Case(name="paper-shape", sequences=8, anchors=64, vocabulary=49_152),
        Case(
            name="reduced",
            sequences=4,
            anchors=100,
            vocabulary=49_152,
            draft_vocabulary=8192,
            rank=64,
            ways=("fused", "fused, known normalizers"),
        ),
        Case(name="wide", sequences=8, anchors=64, vocabulary=151_936, ways=("fused",)),
    )
}


def measure(case: Case, way: str, *, repeats: int, threads: int, chunk: int | None) -> dict[str, float]:
    """Runs in a process of its own."""
    from types import SimpleNamespace

    import numpy as np
    import torch
    from torch import nn

    from dspark.losses.anchors import draw_anchors, loss_mask_of
    from dspark.losses.fused_loss import fused_loss, output_head_of
    from dspark.losses.losses import LossConfig
    from dspark.losses.micro_batch import Teacher, make_micro_batch
    from dspark.losses.output_head import log_normalizers
    from dspark.models.heads import SequentialHead
    from storage.cache.shards import StoredRow

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    length = case.prompt_tokens + case.answer_tokens
    span = (case.prompt_tokens, length)
    teacher_positions = torch.arange(span[0] - 1, span[1] - 1)
    samples = [
        StoredRow(
            sample_id=str(index),
            input_ids=torch.randint(0, case.vocabulary, (length,)),
            spans=(span,),
            hidden_states=torch.zeros(length, 1),
            teacher_positions=teacher_positions,
            teacher=Teacher(last_hidden_state=torch.randn(len(teacher_positions), case.hidden)),
        )
        for index in range(case.sequences)
    ]
    mask = loss_mask_of([span], length)
    anchors = [draw_anchors(mask, case.anchors, seed=0, epoch=0, sample_id=s.sample_id) for s in samples]
    batch = make_micro_batch(samples, anchors, case.slots)

    config = SimpleNamespace(
        vocab_size=case.vocabulary, markov_rank=case.rank, hidden_size=case.hidden, final_logit_softcapping=None
    )
    lm_head = nn.Linear(case.hidden, case.vocabulary, bias=False).requires_grad_(False)
    nn.init.normal_(lm_head.weight, std=0.1)
    sequential = SequentialHead(config)  # type: ignore[arg-type]
    nn.init.normal_(sequential.markov_w2.weight, std=0.02)
    proj = nn.Linear(case.hidden + case.rank, 1)
    draft_ids = None
    if case.draft_vocabulary is not None:
        draft_ids = torch.randperm(case.vocabulary)[: case.draft_vocabulary].sort().values
    drafter = SimpleNamespace(
        config=config,
        lm_head=lm_head,
        sequential_head=sequential,
        draft_token_ids=draft_ids,
        confidence_logits=lambda states, ids: proj(torch.cat([states, sequential.embed(ids)], -1)).squeeze(-1),
    )
    states = torch.randn(batch.num_blocks, case.slots, case.hidden, requires_grad=True)
    loss_config = LossConfig(chunk_slots=chunk)
    head = output_head_of(drafter)  # type: ignore[arg-type]
    if way.endswith("known normalizers"):
        batch.teacher.log_normalizers = log_normalizers(batch.teacher, head)

    def plain() -> torch.Tensor:
        weights = torch.exp(-torch.arange(case.slots) / loss_config.position_decay) * batch.loss_mask
        total = weights.sum() + 1e-6
        logits = lm_head(states) + sequential.bias(sequential.bias_vectors(states, batch.previous_ids))
        teacher_logits = lm_head(batch.teacher.last_hidden_state[batch.teacher_index])  # type: ignore[union-attr]
        ce = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        l1 = (logits.softmax(-1) - teacher_logits.softmax(-1)).abs().sum(-1)
        with torch.no_grad():
            acceptance = torch.minimum(logits.softmax(-1), teacher_logits.softmax(-1)).sum(-1)
        confidence = drafter.confidence_logits(states, batch.previous_ids)
        bce = nn.functional.binary_cross_entropy_with_logits(confidence, acceptance.clamp(0, 1), reduction="none")
        return (weights * (0.1 * ce.view_as(l1) + 0.9 * l1 + bce)).sum() / total

    def step() -> float:
        states.grad = None
        sequential.zero_grad()
        loss = plain() if way == "plain" else fused_loss(drafter, states, batch, loss_config, head=head).loss  # type: ignore[arg-type]
        loss.backward()
        return loss.item()

    torch.mm(torch.randn(64, 64), torch.randn(64, 64))
    before = _resident_bytes()
    wall, processor = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter(), time.process_time()
        loss = step()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - start_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    supervised = int(batch.loss_mask.sum())
    return {
        "loss": loss,
        "best_s": min(wall),
        "median_s": statistics.median(wall),
        "cpu_s": min(processor),
        "slots_per_s": supervised / min(wall),
        "extra_bytes": peak - before,
        "supervised": supervised,
        "teacher_positions": len(batch.teacher),
        "gradient_norm": float(np.sqrt(float(states.grad.square().sum()))),  # type: ignore[union-attr]
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunks", default="", help="chunk sizes to try for the fused way, such as 256,512")
    parser.add_argument("--sequences", type=int, help="fewer sequences than the case has, where memory is short")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        task = json.loads(options.worker)
        case = Case(**task.pop("case"))
        print(json.dumps(measure(case, **task)))
        return
    print("| case | way | chunk | best s | median s | CPU s | slots/s | extra memory MB | loss | gradient norm |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.case or CASES:
        case = CASES[name]
        if options.sequences:
            case = replace(case, sequences=options.sequences)
        for way in case.ways:
            chunks = [int(chunk) for chunk in options.chunks.split(",") if chunk] if way != "plain" else []
            for chunk in chunks or [None]:
                task = {"case": asdict(case), "way": way, "repeats": options.repeats, "threads": options.threads}
                command = [sys.executable, __file__, "--worker", json.dumps({**task, "chunk": chunk})]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                if done.returncode:
                    print(f"| {name} | {way} | {chunk or 'auto'} | did not finish (exit {done.returncode}) |")
                    continue
                found = json.loads(done.stdout)
                print(
                    f"| {name} | {way} | {chunk or 'auto'} | {found['best_s']:.2f} | {found['median_s']:.2f} "
                    f"| {found['cpu_s']:.2f} | {found['slots_per_s']:.0f} | {found['extra_bytes'] / 2**20:.0f} "
                    f"| {found['loss']:.6f} | {found['gradient_norm']:.6e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
