"""One exact cache, for benchmarks/codec_training.py: code it, train from what was coded, judge on exact states."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.engine_settings import learning_rate_factor
from dspark.decoding.decoder import Decoder, Request, SamplingConfig
from dspark.decoding.proposers import Committed, proposer_for
from dspark.losses.fused_loss import BlockLoss
from dspark.losses.losses import add_sums, metrics_of
from dspark.models.checkpoint import load_drafter, save_drafter
from pipelines.data.chat import render_prompt
from pipelines.settings import Settings
from pipelines.stages.decoding import read_split
from pipelines.target_spec import resolve_target
from pipelines.training.loader import MicroBatchReader, Rows
from pipelines.training.model import make_drafter, teacher_normalizers
from pipelines.training.task import TrainingTask, step_plan
from pipelines.workers import open_target
from storage.cache.target_cache import CachePlan, CacheRow, Codecs, TargetCache, create_or_resume, finish, write_shard
from storage.codecs.base import TargetParts, TeacherRow
from storage.codecs.components import leading_components
from storage.codecs.fitting import fit_codec, fit_teacher
from storage.codecs.registry import CodecSpec

FIT_ROWS = 96


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Codecs of a cache; `width`: components of a projected codec, in hidden sizes."""

    hidden_states: str
    teacher: str
    hidden_states_options: dict[str, Any] = field(default_factory=dict)
    teacher_options: dict[str, Any] = field(default_factory=dict)
    width: float | None = None


ARMS = {
    "exact": Arm(hidden_states="bf16", teacher="bf16"),
    "default": Arm(hidden_states="projected", teacher="corrected", width=1.5),
    "small": Arm(
        hidden_states="projected",
        teacher="corrected",
        teacher_options={"step": 0.0625, "top": 8},
        width=1,
    ),
    "any-drafter": Arm(
        hidden_states="transform",
        hidden_states_options={"step": 0.5, "output": "coordinates"},
        teacher="corrected",
    ),
    "int8": Arm(hidden_states="int8", teacher="int8"),
}


class Experiment:
    """One exact cache, and what is made of it."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self.settings, self.work = settings, work
        self.spec = resolve_target(settings)
        self.exact = TargetCache.open(f"{settings.run.directory}/cache")
        self.target = open_target(settings, self.spec)
        self.parts = TargetParts(head=self.target.lm_head.weight.detach())
        self._readers: dict[str, MicroBatchReader] = {}

    def row(self, index: int) -> CacheRow:
        """An exact row as a builder would hand it over; last states are zero where there is no teacher."""
        stored = self.exact.row(index)
        last = torch.zeros(len(stored.input_ids), self.spec.hidden_size, dtype=torch.bfloat16)
        last[stored.teacher_positions] = stored.last_hidden_state
        return CacheRow(
            sample_id=stored.sample_id,
            input_ids=stored.input_ids,
            spans=stored.spans,
            hidden_states=stored.hidden_states,
            last_hidden_state=last,
            extra=stored.extra,
        )

    def teacher_row(self, index: int) -> TeacherRow:
        row, stored = self.row(index), self.exact.row(index)
        assert isinstance(row.last_hidden_state, torch.Tensor)
        assert isinstance(row.hidden_states, torch.Tensor)
        return TeacherRow(
            hidden_states=row.hidden_states,
            last_hidden_state=row.last_hidden_state,
            positions=stored.teacher_positions.numpy(),
        )

    def code(self, name: str, arm: Arm, rows: Sequence[int], tensors: dict[str, torch.Tensor] | None) -> TargetCache:
        """The exact cache's rows as a cache of the arm."""
        root, layers, width = self.work / "caches" / name, len(self.spec.target_layer_ids), self.spec.hidden_size
        if (root / "COMPLETE.json").exists():
            return TargetCache.open(root)
        fitting = rows[:: max(1, len(rows) // FIT_ROWS)]
        hidden_states = CodecSpec(name=arm.hidden_states, settings=arm.hidden_states_options)
        teacher = CodecSpec(name=arm.teacher, settings=arm.teacher_options)
        plan = CachePlan(
            contract=self.exact.contract,
            num_layers=layers,
            hidden_size=width,
            samples=[(self.exact.sample_ids[index], int(self.exact.lengths[index])) for index in rows],
            hidden_states=hidden_states,
            teacher=teacher,
            inputs={
                "exact": self.exact.identity,
                "components": None if tensors is None else len(tensors["projection"]),
            },
        )
        codecs = Codecs(
            hidden_states=fit_codec(
                hidden_states,
                [(self.exact.row(index).hidden_states, True) for index in fitting],
                width=layers * width,
                layers=layers,
                tensors=tensors,
            ),
            teacher=fit_teacher(
                teacher, [self.teacher_row(index) for index in fitting], width=width, target=self.parts
            ),
        )
        done, place = create_or_resume(root, plan, codecs), 0
        for shard, (start, stop) in enumerate(plan.shards):
            if shard not in done:
                write_shard(root, shard, [self.row(index) for index in rows[start:stop]], codecs)
            place = stop
        assert place == len(rows)
        finish(root)
        return TargetCache.open(root)

    def train(self, cache: TargetCache, seed: int, steps: int, folder: Path) -> dict[str, Any]:
        """Train from the cache and write the folded drafter."""
        settings = self.settings.model_copy(update={"run": self.settings.run.model_copy(update={"seed": seed})})
        task = TrainingTask(
            settings=settings,
            spec=self.spec,
            cache=str(cache.folder.url),
            output=str(folder),
            total_steps=steps,
            threads=torch.get_num_threads(),
        )
        module = BlockLoss(make_drafter(task, cache), settings.train.loss.config)
        module.take_head()
        plan = step_plan(settings, Rows.of(cache), steps)
        reader = self._readers.setdefault(
            cache.folder.url,  # one for all seeds: the teacher's normalisers are the same
            MicroBatchReader(
                dtype=torch.float32, block_size=plan.block_size, log_normalizers=teacher_normalizers(module)
            ),
        )
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1.0, betas=(0.9, 0.95), weight_decay=settings.train.weight_decay)
        began = time.perf_counter()
        sums: dict[str, float] = {}
        for number in range(steps):
            step = plan.step(number)
            for group in optimizer.param_groups:
                factor = learning_rate_factor(number, steps, warmup_ratio=settings.train.warmup_ratio)
                group["lr"] = settings.train.learning_rate * factor
            optimizer.zero_grad()
            for planned in step.micro_batches:
                loss, found = module(reader(cache, planned), step.normalizer)
                loss.backward()
                sums = add_sums(sums, found) if number >= steps - 20 else {}
            torch.nn.utils.clip_grad_norm_(trained, settings.train.max_grad_norm)
            optimizer.step()
        save_drafter(module.drafter, folder, self.spec.text_config)
        return {
            "steps": steps,
            "seconds": round(time.perf_counter() - began, 1),
            "training": metrics_of(sums) if sums else {},
        }

    def held_out(self) -> TargetCache:
        """The target's own answers to the held-out prompts with their exact states."""
        root = self.work / "held-out"
        if not (root / "COMPLETE.json").exists():
            rows = []
            for answer in self.decode(None).values():
                ids = [*answer.prompt_ids, *answer.output_ids]
                states = self.target.capture(torch.tensor([ids]))
                rows.append(
                    CacheRow(
                        sample_id=answer.request_id,
                        input_ids=ids,
                        spans=[(len(answer.prompt_ids), len(ids))],
                        hidden_states=states.hidden_states[0].bfloat16(),
                        last_hidden_state=states.last_hidden_state[0].bfloat16(),
                    )
                )
            plan = CachePlan(
                contract=self.exact.contract,
                num_layers=len(self.spec.target_layer_ids),
                hidden_size=self.spec.hidden_size,
                samples=[(row.sample_id, len(row.input_ids)) for row in rows],
            )
            create_or_resume(root, plan)
            for shard, (start, stop) in enumerate(plan.shards):
                write_shard(root, shard, rows[start:stop])
            finish(root)
        return TargetCache.open(root)

    def decode(self, drafter: Any) -> dict[str, Any]:
        """Completions of the held-out prompts, greedy, by prompt."""
        requests = []
        for split in ("calibration", "evaluation"):
            for prompt in read_split(Path(self.settings.run.directory, "conversations", f"{split}.jsonl"), split):
                ids = render_prompt(self.target.tokenizer, prompt.messages, thinking=False, row=prompt.prompt_id)
                requests.append(
                    Request(
                        request_id=prompt.prompt_id,
                        prompt_ids=ids,
                        max_new_tokens=self.settings.evaluate.max_new_tokens,
                        stop_token_ids=frozenset(self.spec.stop_token_ids),
                        seed=0,
                    )
                )
        decoder = Decoder(
            self.target, drafter, sampling=SamplingConfig(temperature=0.0), max_rows=self.settings.evaluate.batch_size
        )
        return {done.request_id: done for done in decoder.generate(requests)}

    @torch.no_grad()
    def replay(self, drafter: Any) -> dict[str, list[int]]:
        """Accepted length of every round of greedy decoding, by prompt, from the recorded answers and exact states."""
        cache = self.held_out()
        proposer = proposer_for(drafter, self.target)
        rows = list(cache.rows(range(len(cache)), dtype=torch.float32))
        proposer.open(len(rows), int(cache.lengths.max()) + 2 * drafter.block_size)
        known = [0] * len(rows)  # positions whose states the drafter has
        at = [row.spans[0][0] for row in rows]  # the anchor: the first token comes from the prompt's own pass
        lengths: dict[str, list[int]] = {row.sample_id: [] for row in rows}
        while True:
            open_rows = [index for index, row in enumerate(rows) if at[index] + 1 < len(row.input_ids)]
            if not open_rows:
                return lengths
            new = [rows[index].hidden_states[known[index] : at[index]] for index in range(len(rows))]
            proposer.extend(
                Committed(
                    rows=list(range(len(rows))),
                    starts=list(known),
                    counts=[len(part) for part in new],
                    token_ids=torch.cat([row.input_ids[known[index] : at[index]] for index, row in enumerate(rows)]),
                    hidden_states=torch.cat(new),
                    anchors=[int(row.input_ids[at[index]]) for index, row in enumerate(rows)],
                )
            )
            known = list(at)
            anchors = [int(row.input_ids[at[index]]) for index, row in enumerate(rows)]
            drafted = proposer.propose(anchors, at, drafter.block_size, SamplingConfig(temperature=0.0), None).token_ids
            for index in open_rows:
                left = rows[index].input_ids[at[index] + 1 :].tolist()
                guesses = drafted[index].tolist()[: len(left) - 1]  # the last token is the target's own
                kept = 0
                while kept < len(guesses) and guesses[kept] == left[kept]:
                    kept += 1
                lengths[rows[index].sample_id].append(kept + 1)
                at[index] += kept + 1

    def check_replay(self, folder: Path) -> dict[str, int]:
        """How many prompts the live target decodes in the very rounds of the replay (the last, cut-off one apart)."""
        drafter = load_drafter(folder, dtype=torch.float32)
        replayed, same = self.replay(drafter), 0
        for name, done in self.decode(drafter).items():
            live = [1 + event.accepted_raw for event in done.rounds]
            count = min(len(live), len(replayed[name])) - 1
            same += live[:count] == replayed[name][:count]
        return {"prompts": len(replayed), "same_rounds": same}

    def judge(self, folder: Path, *, zeroed: bool = False) -> dict[str, dict[str, float]]:
        """By prompt: `accepted`, mean accepted length of greedy decoding (bonus token included), and `expected`, the
        expected accepted length at temperature 1 at fixed anchors of the target's own answer. Exact states."""
        drafter = load_drafter(folder, dtype=torch.float32)
        if zeroed:
            drafter.fc.weight.data.zero_()
        found: dict[str, dict[str, float]] = {}
        for name, lengths in self.replay(drafter).items():
            found[name] = {"accepted": float(np.mean(lengths or [1.0])), "rounds": float(len(lengths))}
        module = BlockLoss(drafter, self.settings.train.loss.config)
        module.take_head()
        cache = self.held_out()
        plan = replace(step_plan(self.settings, Rows.of(cache), 1), global_batch_size=len(cache), seed=12345)
        reader = self._readers.setdefault(
            cache.folder.url,
            MicroBatchReader(
                dtype=torch.float32, block_size=plan.block_size, log_normalizers=teacher_normalizers(module)
            ),
        )
        with torch.no_grad():
            for planned in plan.step(0).micro_batches:
                for row, anchors in zip(planned.rows, planned.anchors, strict=True):
                    batch = reader(cache, replace(planned, rows=(row,), anchors=(anchors,)))
                    metrics = metrics_of(module(batch, 1.0)[1])
                    found[cache.sample_ids[row]]["expected"] = metrics["tau_probabilistic"]
        return found


def components(experiment: Experiment, pilot: Path, rows: Sequence[int], count: int) -> dict[str, torch.Tensor]:
    """The leading components of a trained pilot's context projection, and their shares."""
    weight = load_drafter(pilot).fc.weight.detach()
    sample = [(experiment.exact.row(index).hidden_states.float(), True) for index in rows]
    projection, shares = leading_components([weight], sample, count)
    return {"projection": projection, "shares": shares}
