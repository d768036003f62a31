"""A training step of this code against the plain way: same model, same samples, same supervised positions, same run.

1. Make a drafter of the shape's size over a random embedding and head, and a cache of random states whose answers have
   log-normal lengths, in a temporary folder.
2. Take steps in each way, each in a process of its own:
   `plain`      one sequence a micro-batch, always as many blocks as anchors are allowed (dummy ones where the sequence
                has fewer), the logits of all slots at once, the target's head projected for every slot beside the
                draft's, dense attention; torch's optimizer.
   `bare loop`  this code's micro-batches, attention and loss under the same optimizer, without DeepSpeed or Ray.
   `DeepSpeed`  the same under the training engine, micro-batches read from the cache by a loader worker ahead of need.
   `Ray Train`  that again in a training group's worker.
3. Print seconds a step, those of the processor in this process (which a busy machine changes less), supervised
   positions a second, peak memory, the loss and the gradient's norm (equal where the
   step is the same), the loader's wait, and on a GPU the model FLOPs utilisation.

    python benchmarks/train_step.py                                          # SmolLM2-135M's shape, on a CPU
    python benchmarks/train_step.py --shape qwen3-4b --device cuda --peak-tflops 989
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

WAYS = ("plain", "bare loop", "DeepSpeed", "Ray Train")
OPTIMIZER = {"betas": (0.9, 0.95), "lr": 6e-4, "weight_decay": 0.0, "fused": True}
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of target and drafter; the drafter's parts and the anchors are the paper's."""

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int = 64
    layers: int = 5
    captured: int = 5
    rank: int = 256
    block: int = 7
    anchors: int = 512
    prompt: int = 64
    answer: int = 380  # median tokens of an answer
    longest: int = 1024
    sequences: int = 4  # a step
    budget: int = 4096  # work of a micro-batch
    dtype: str = "float32"
    codec: str = "int8"


SHAPES = {
    "smollm2-135m": Shape(vocabulary=49_152, hidden=576, inner=1536, heads=9, key_heads=3),
    "qwen3-4b": Shape(
        vocabulary=151_936,
        hidden=2560,
        inner=9728,
        heads=32,
        key_heads=8,
        head_dim=128,
        answer=700,
        longest=4096,
        sequences=32,
        budget=16_384,
        dtype="bfloat16",
    ),
    "small": Shape(
        vocabulary=512, hidden=32, inner=64, heads=4, key_heads=2, head_dim=8, anchors=16, answer=12, longest=64, rank=8
    ),
}


def make_samples(shape: Shape, count: int) -> list[tuple[str, int, int]]:
    """(id, prompt tokens, all tokens): answers log-normal with a standard deviation of 0.5 in the logarithm."""
    import numpy as np

    answers = np.exp(np.random.default_rng(0).normal(np.log(shape.answer), 0.5, count))
    return [
        (f"sample-{i}", shape.prompt, shape.prompt + min(shape.longest, max(4, round(n))))
        for i, n in enumerate(answers)
    ]


def make_cache(shape: Shape, root: Path, steps: int) -> None:
    """Random states for as many samples as the steps take."""
    import torch

    from storage.cache.plan import Codecs
    from storage.cache.target_cache import (
        CachePlan,
        CacheRow,
        CodecSpec,
        create_or_resume,
        finish,
        fit_codec,
        write_shard,
    )

    samples = make_samples(shape, shape.sequences * steps)

    def row(name: str, prompt: int, length: int) -> CacheRow:
        generator = torch.Generator().manual_seed(int(name.split("-")[1]))
        return CacheRow(
            sample_id=name,
            input_ids=torch.randint(0, shape.vocabulary, (length,), generator=generator),
            spans=[(prompt, length)],
            hidden_states=torch.randn(length, shape.captured, shape.hidden, generator=generator),
            last_hidden_state=torch.randn(length, shape.hidden, generator=generator),
        )

    spec = CodecSpec(name=shape.codec)
    plan = CachePlan(
        contract={"target_name": "random"},
        num_layers=shape.captured,
        hidden_size=shape.hidden,
        samples=[(name, length) for name, _, length in samples],
        hidden_states=spec,
        teacher=spec,
    )
    first = row(*samples[0])
    codecs = Codecs(
        hidden_states=fit_codec(
            spec, [(first.hidden_states.flatten(1), True)], width=shape.captured * shape.hidden, layers=shape.captured
        ),
        teacher=fit_codec(spec, [(first.last_hidden_state, True)], width=shape.hidden),
    )
    create_or_resume(root, plan, lambda: codecs)
    for shard, (start, stop) in enumerate(plan.shards):
        write_shard(root, shard, [row(*sample) for sample in samples[start:stop]])
    finish(root)


class Bench:
    """The drafter, the plan of the steps and the batches, in one process."""

    def __init__(self, shape: Shape, root: Path, device: str, threads: int, steps: int) -> None:
        import torch
        from transformers import Qwen3Config

        from dspark.config import DrafterConfig
        from dspark.losses.fused_loss import BlockLoss
        from dspark.losses.losses import LossConfig
        from dspark.models.dspark import DSpark
        from pipelines.training.loader import MicroBatchReader, Rows, StepPlan
        from storage.cache.target_cache import TargetCache

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.shape, self.device, self.dtype = shape, device, getattr(torch, shape.dtype)
        text = Qwen3Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=36,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=8192,
        )
        config = DrafterConfig.for_target(
            text,
            mask_token_id=1,
            num_draft_layers=shape.layers,
            block_size=shape.block,
            markov_rank=shape.rank,
            target_layer_ids=tuple(range(0, 5 * shape.captured, 5)),
        )
        self.drafter = DSpark(config)
        self.drafter.initialise_random(0)
        self.drafter = self.drafter.to(device, torch.float32)
        table = torch.randn(shape.vocabulary, shape.hidden, device=device) * 0.05
        self.drafter.share_target(table, table)
        self.module = BlockLoss(self.drafter, LossConfig())
        self.cache = TargetCache.open(root)
        self.plan = StepPlan(
            rows=Rows.of(self.cache),
            seed=0,
            global_batch_size=shape.sequences,
            num_anchors=shape.anchors,
            anchor_rule="paper",
            block_size=shape.block,
            position_decay=4.0,
            max_tokens_per_micro_batch=shape.budget,
            total_steps=steps,
        )
        self.reader = MicroBatchReader(dtype=self.dtype, block_size=shape.block)

    def parameters(self) -> list[Any]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def autocast(self) -> Any:
        """bf16 computes under autocast over fp32 weights, as loops without an engine do."""
        import torch

        return torch.autocast(torch.device(self.device).type, self.dtype, enabled=self.shape.dtype != "float32")

    def flops(self) -> float:
        """Model FLOPs of the mean step: forward and backward of what is trained, forward and input gradient of the
        frozen head, at the supervised positions; the teacher's projection once a position."""
        shape, total = self.shape, 0.0
        width, keys = shape.heads * shape.head_dim, 2 * shape.key_heads * shape.head_dim
        layer = shape.hidden * (2 * width + keys) + 3 * shape.hidden * shape.inner
        for step in map(self.plan.step, range(self.plan.total_steps)):
            for planned in step.micro_batches:
                batch = self.reader(self.cache, planned)
                tokens, slots = batch.num_context_tokens, batch.num_blocks * shape.block
                seen = (batch.block_anchor - batch.sequence_starts[batch.block_sequence] + shape.block).sum().item()
                context = tokens * shape.hidden * (shape.captured * shape.hidden + shape.layers * keys)
                blocks = shape.layers * (slots * layer + 2 * shape.block * seen * width)
                supervised, head = int(batch.loss_mask.sum()), shape.vocabulary * shape.hidden
                markov = 3 * supervised * shape.vocabulary * shape.rank
                total += 2 * (3 * (context + blocks) + 2 * supervised * head + len(batch.teacher) * head + markov)
        return total / self.plan.total_steps

    def plain_steps(self) -> Iterator[tuple[float, float, int, float]]:
        """(loss, gradient norm, supervised positions, seconds waited) of each step."""
        import torch

        self.drafter.attention = "sdpa"
        optimizer = torch.optim.AdamW(self.parameters(), **OPTIMIZER)
        for number in range(self.plan.total_steps):
            step, loss, supervised = self.plan.step(number), 0.0, 0
            for planned in step.micro_batches:
                for row, anchors in zip(planned.rows, planned.anchors, strict=True):
                    one = replace(planned, rows=(row,), anchors=(anchors,))
                    batch = with_dummies(self.reader(self.cache, one), self.shape.anchors).to(self.device)
                    with self.autocast():
                        part = plain_loss(self.drafter, batch) / step.normalizer
                    part.backward()
                    loss += part.item()
                    supervised += int(batch.loss_mask.sum())
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            yield loss, float(norm), supervised, 0.0

    def bare_steps(self) -> Iterator[tuple[float, float, int, float]]:
        import torch

        from cluster.engine import release_freed_memory

        self.module.take_head()
        optimizer = torch.optim.AdamW(self.parameters(), **OPTIMIZER)
        for number in range(self.plan.total_steps):
            step, loss, supervised = self.plan.step(number), 0.0, 0
            for planned in step.micro_batches:
                batch = self.reader(self.cache, planned).to(self.device)
                with self.autocast():
                    part, sums = self.module(batch, step.normalizer)
                part.backward()
                loss += part.item()
                supervised += int(sums["slots"])
                del part
                release_freed_memory()
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            yield loss, float(norm), supervised, 0.0

    def engine_steps(self) -> Iterator[tuple[float, float, int, float]]:
        from cluster.engine import build_engine
        from cluster.engine_settings import DeepSpeedSettings
        from pipelines.training.loader import Loader

        settings = DeepSpeedSettings(
            zero_stage=0 if self.shape.dtype == "float32" else 1,
            precision="fp32" if self.shape.dtype == "float32" else "bf16",
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            max_grad_norm=CLIP,
        )
        engine = build_engine(self.module, settings, self.plan.total_steps)
        self.module.take_head()
        pin = engine.device.type == "cuda"
        with Loader(self.cache, self.reader, self.plan, first=0, workers=1, pin=pin) as loader:
            for step in loader.steps():
                waited, supervised = 0.0, 0

                def loss_of(planned: Any, normalizer: float = step.normalizer) -> Any:
                    nonlocal waited, supervised
                    asked = time.perf_counter()
                    batch = loader.batch()
                    waited += time.perf_counter() - asked
                    loss, sums = engine.deepspeed(batch.to(engine.device, non_blocking=True), normalizer)
                    supervised += int(sums["slots"])
                    return loss

                result = engine.train_step(step.number, step.micro_batches, loss_of)
                yield result.loss, result.gradient_norm, supervised, waited


def with_dummies(batch: Any, blocks: int) -> Any:
    """A batch of one sequence filled up to `blocks` blocks by repeating its first one, without supervision."""
    import torch

    index = torch.zeros(blocks, dtype=torch.long)
    index[: batch.num_blocks] = torch.arange(batch.num_blocks)
    dummy = torch.arange(blocks) >= batch.num_blocks
    return replace(
        batch,
        block_sequence=batch.block_sequence[index],
        block_anchor=batch.block_anchor[index],
        block_starts=torch.tensor([0, blocks]),
        previous_ids=batch.previous_ids[index],
        labels=batch.labels[index],
        loss_mask=batch.loss_mask[index] & ~dummy[:, None],
        teacher_index=batch.teacher_index[index],
    )


def plain_loss(drafter: Any, batch: Any) -> Any:
    """The summed loss of a batch in the plain words of the formula: logits [N, G, V] of draft and target at once."""
    import torch
    from torch.nn import functional as F

    states = drafter.block_states(batch)
    head = drafter.sequential_head
    logits = drafter.lm_head(states) + head.bias_vectors(states, batch.previous_ids) @ head.markov_w2.weight.T
    target = drafter.lm_head(batch.teacher.last_hidden_state[batch.teacher_index].to(states.dtype))
    draft, teacher = logits.float().softmax(-1), target.float().softmax(-1)
    weights = torch.exp(-torch.arange(states.shape[1], device=states.device) / 4.0) * batch.loss_mask
    ce = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(weights)
    l1 = (draft - teacher).abs().sum(-1)
    with torch.no_grad():
        acceptance = torch.minimum(draft, teacher).sum(-1)
    confidence = drafter.confidence_logits(states, batch.previous_ids).float()
    bce = F.binary_cross_entropy_with_logits(confidence, acceptance.clamp(0, 1), reduction="none")
    return (weights * (0.1 * ce + 0.9 * l1 + bce)).sum()


def measure(task: dict[str, Any]) -> dict[str, float]:
    """Steps in one way, in this process; the first one, which warms up, is left out of the times if there are more."""
    import torch

    shape, began = Shape(**task["shape"]), time.perf_counter()
    bench = Bench(shape, Path(task["cache"]), task["device"], task["threads"], task["steps"])
    ways: dict[str, Callable[[], Iterator[tuple[float, float, int, float]]]] = {
        "plain": bench.plain_steps,
        "bare loop": bench.bare_steps,
    }
    found, clock, processor = [], time.perf_counter(), time.process_time()
    for loss, norm, supervised, waited in ways.get(task["way"], bench.engine_steps)():
        if bench.device != "cpu":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - clock, loss, norm, supervised, waited, time.process_time() - processor))
        clock, processor = time.perf_counter(), time.process_time()
    counted = found[1:] or found
    seconds = [one[0] for one in counted]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_s": statistics.mean(seconds),
        "start_s": clock - began - sum(one[0] for one in found),
        "cpu_s": statistics.mean(one[5] for one in counted),
        "supervised_per_s": sum(one[3] for one in counted) / sum(seconds),
        "supervised": sum(one[3] for one in counted) / len(counted),
        "peak_bytes": peak if bench.device == "cpu" else torch.cuda.max_memory_allocated(),
        "wait_share": sum(one[4] for one in counted) / sum(seconds),
        "loss": found[0][1],
        "gradient_norm": found[0][2],
        "flops": bench.flops() if task["way"] == "bare loop" else 0.0,
    }


def worker(config: dict[str, Any]) -> None:
    """The same in a training group."""
    Path(config["answer"]).write_text(json.dumps(measure(config)))


def in_group(task: dict[str, Any]) -> dict[str, float]:
    from cluster.session import ray_session
    from cluster.train_group import run_group

    with tempfile.TemporaryDirectory() as folder, ray_session(num_cpus=task["threads"]):
        config = {**task, "answer": f"{folder}/answer.json"}
        cuda = task["device"] != "cpu"
        run_group(worker, config, num_workers=1, cpus_per_worker=task["threads"], use_gpu=cuda, storage_path=folder)
        return json.loads(Path(config["answer"]).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of every way; the first one warms up")
    parser.add_argument("--sequences", type=int, help="in a step; default: the shape's")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--peak-tflops", type=float, help="of the device, to print the model FLOPs utilisation")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        task = json.loads(options.worker)
        print(json.dumps(in_group(task) if task["way"] == "Ray Train" else measure(task)))
        return
    shape = SHAPES[options.shape]
    shape = replace(shape, sequences=options.sequences or shape.sequences)
    columns = (
        "s a step",
        "CPU s",
        "supervised positions/s",
        "peak MB",
        "loader wait",
        "start s",
        "loss",
        "gradient norm",
    )
    print(f"{options.shape} on {options.device}, {options.threads} threads, {shape.sequences} sequences a step")
    print("| way |", " | ".join(columns), "|\n|" + " --- |" * (len(columns) + 1))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_cache(shape, Path(folder, "cache"), options.steps)
        common = {"shape": asdict(shape), "cache": f"{folder}/cache", "device": options.device}
        for way in options.ways.split(","):
            task = {**common, "threads": options.threads, "steps": options.steps, "way": way}
            command = [sys.executable, __file__, "--worker", json.dumps(task)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                print(f"| {way} | did not finish (exit {done.returncode}) |")
                continue
            results[way] = found = json.loads(done.stdout.splitlines()[-1])
            wait = f"{found['wait_share']:.1%}" if way in WAYS[2:] else "-"
            cells = [f"{found[name]:.2f}" for name in ("step_s", "cpu_s")]
            cells += [f"{found['supervised_per_s']:.0f}", f"{found['peak_bytes'] / 1e6:.0f}", wait]
            cells += [f"{found['start_s']:.1f}", f"{found['loss']:.6f}", f"{found['gradient_norm']:.5f}"]
            print("|", " | ".join([way, *cells]), "|", flush=True)
    _compare(results, options.peak_tflops)


def _compare(results: dict[str, dict[str, float]], peak_tflops: float | None) -> None:
    plain, bare = results.get("plain"), results.get("bare loop")
    if plain and bare:
        speed = bare["supervised_per_s"] / plain["supervised_per_s"]
        memory = bare["peak_bytes"] / plain["peak_bytes"]
        processor = plain["cpu_s"] / bare["cpu_s"]
        print(
            f"against the plain way: {speed:.2f} times the supervised positions a second ({processor:.2f} times those "
            f"of a CPU second), {memory:.2f} of its memory"
        )
    for way in WAYS[2:]:
        if bare and way in results:
            print(f"{way} over the bare loop: {results[way]['step_s'] / bare['step_s'] - 1:+.1%} a step")
    if bare and peak_tflops:
        for way in WAYS[1:]:
            if way in results:
                rate = bare["flops"] / results[way]["step_s"] / (peak_tflops * 1e12)
                print(f"{way}: model FLOPs utilisation {rate:.1%} of {peak_tflops:g} TFLOP/s")


if __name__ == "__main__":
    main()
