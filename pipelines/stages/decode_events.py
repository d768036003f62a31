"""Decoding prompts with a drafter, or without, and keeping every round: what calibration and evaluation share.

Work is cut into units of prompts that are decoded together. Each finished completion is one file; a unit whose
completions are all there is not done again.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.data.chat import render_prompt, thinks
from pipelines.data.conversations import Prompt, prompt_from_row, read_jsonl
from pipelines.reporting.events import EventLog, Labels, completion_key
from pipelines.settings import Settings
from pipelines.stages.regenerate import make_request
from pipelines.stages.workers import on_pool, open_target, session
from pipelines.target_facts import TargetFacts

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.progress import Reporter

DSPARK, NO_HEAD, PLAIN, BASELINE = "dspark", "no-sequential-head", "plain", "baseline"


@dataclass(frozen=True, kw_only=True)
class DecodeUnit:
    """Prompts to decode together by one variant (a name of this module) at one temperature and seed."""

    variant: str
    temperature: float
    seed: int
    split: str
    prompts: tuple[Prompt, ...]
    number: int

    def __str__(self) -> str:
        return f"{self.split}: {self.variant}, temperature {self.temperature:g}, seed {self.seed}, part {self.number}"

    @property
    def file(self) -> str:
        """Where the unit's stopwatch record and what it skipped are kept, written when all its completions are."""
        return f"units/{self.variant}-t{self.temperature:g}-s{self.seed}-{self.number:04d}.json"


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What every unit of a stage has in common; picklable."""

    settings: Settings
    facts: TargetFacts
    folder: str
    circumstances: dict[str, Any]
    drafter: str | None
    baseline: str | None
    max_new_tokens: int
    rows: int
    temperatures: tuple[float, ...] | None = None  # calibrated, of the confidences


def read_split(path: Path, split: str) -> list[Prompt]:
    """The held-out prompts that `regenerate` laid beside the conversations."""
    prompts = (prompt_from_row(row, place, split=split) for place, row in read_jsonl(path))
    return [prompt for prompt in prompts if prompt is not None]


def cut(
    prompts: Sequence[Prompt], *, variant: str, temperature: float, seed: int, split: str, rows: int
) -> list[DecodeUnit]:
    """Units of four batches each: enough for rows to be refilled, little to lose."""
    size = 4 * rows
    return [
        DecodeUnit(
            variant=variant,
            temperature=temperature,
            seed=seed,
            split=split,
            prompts=tuple(prompts[start : start + size]),
            number=number,
        )
        for number, start in enumerate(range(0, len(prompts), size))
    ]


def decode_all(plan: DecodePlan, units: Sequence[DecodeUnit], workers: int, reporter: Reporter) -> list[dict[str, Any]]:
    """Decode what is not there yet, merge the events, and return the units' stopwatch records."""
    log = EventLog(plan.folder, plan.circumstances)
    todo = [unit for unit in units if not log.folder.exists(unit.file)]
    total = sum(len(unit.prompts) for unit in units)
    done = total - sum(len(unit.prompts) for unit in todo)
    if todo:
        what = (
            "decoding the calibration prompts" if units[0].split == "calibration" else "decoding the evaluation prompts"
        )
        with session(plan.settings, plan.folder), reporter.task(what, total, "prompts", done) as task:

            def finished(unit: DecodeUnit, result: dict[str, Any]) -> None:
                task.advance(len(unit.prompts), now=f"{unit.variant} T={unit.temperature:g}", **result)

            on_pool(
                plan.settings,
                partial(DecodeWorker, plan),
                todo,
                workers=workers,
                on_result=finished,
                unit_name=str,
            )
    log.merge()
    return [json.loads(log.folder.read(unit.file)) for unit in units]


class DecodeWorker:
    """Holds the target and the drafter, and decodes one unit after the other."""

    def __init__(self, plan: DecodePlan) -> None:
        from dspark.drafter import load_drafter

        self.plan = plan
        self.target = open_target(plan.settings, plan.facts)
        options: dict[str, Any] = {"device": self.target.device, "dtype": self.target.dtype}
        self.drafters: dict[str, Any] = {PLAIN: None}
        if plan.drafter is not None:
            drafter = load_drafter(plan.drafter, **options)
            self.drafters[DSPARK] = drafter
            self.drafters[NO_HEAD] = without_sequential_head(drafter)
        if plan.baseline is not None:
            self.drafters[BASELINE] = load_drafter(plan.baseline, **options)
        self.log = EventLog(plan.folder, plan.circumstances)

    def run(self, unit: DecodeUnit) -> dict[str, Any]:
        from dspark.decoding import Decoder, SamplingConfig

        plan = self.plan
        decoder = Decoder(
            self.target,
            self.drafters[unit.variant],
            sampling=SamplingConfig(temperature=unit.temperature),
            max_rows=plan.rows,
            length_policy=self._policy(unit.variant),
            temperatures=plan.temperatures if unit.variant == DSPARK else None,
            record_gaps=unit.temperature == 0,
        )
        said: dict[str, list[dict[str, str]]] = {p.prompt_id: [dict(m) for m in p.messages] for p in unit.prompts}
        tokens, seconds, skipped = 0, 0.0, {}
        turns = 1 + max(len(prompt.later_turns) for prompt in unit.prompts)
        for turn in range(turns):
            asked, requests = {}, []
            for prompt in unit.prompts:
                if turn > len(prompt.later_turns) or prompt.prompt_id in skipped:
                    continue
                if turn:
                    said[prompt.prompt_id].append({"role": "user", "content": prompt.later_turns[turn - 1]})
                request = self._request(unit, prompt, said[prompt.prompt_id], turn)
                if (why := decoder.why_not(request)) is not None:
                    skipped[prompt.prompt_id] = why
                    continue
                asked[request.request_id] = prompt
                requests.append(request)
            began = time.perf_counter()
            completions = list(decoder.generate(requests)) if requests else []
            seconds += time.perf_counter() - began
            for completion in completions:
                prompt = asked[completion.request_id]
                tokens += len(completion.output_ids)
                ids = [token for token in completion.output_ids if token not in plan.facts.stop_token_ids]
                text = self.target.tokenizer.decode(ids)
                said[prompt.prompt_id].append({"role": "assistant", "content": text})
                self.log.append(completion, labels_of(unit, prompt, self._policy_name(unit.variant)))
        record = {
            "drafter": unit.variant,
            "temperature": unit.temperature,
            "tokens": tokens,
            "seconds": seconds,
            "max_rows": plan.rows,
            "skipped": skipped,
        }
        self.log.folder.write(unit.file, json.dumps(record, indent=1).encode())
        return {"tokens_per_second": tokens / max(seconds, 1e-9)}

    def _request(self, unit: DecodeUnit, prompt: Prompt, messages: list[dict[str, str]], turn: int) -> Any:
        settings = self.plan.settings
        ids = render_prompt(
            self.target.tokenizer,
            messages,
            thinking=thinks(settings.target.thinking, settings.run.seed, prompt.prompt_id),
            row=prompt.prompt_id,
        )
        name = prompt.prompt_id if turn == 0 else f"{prompt.prompt_id}/turn-{turn + 1}"
        return make_request(name, ids, self.plan.max_new_tokens, self.plan.facts, settings.run.seed + unit.seed)

    def _policy_name(self, variant: str) -> str:
        return "full" if variant != DSPARK else self.plan.settings.evaluate.policy

    def _policy(self, variant: str) -> Any:
        from dspark.scheduling import FullBlock, StaticLength, Threshold

        wanted, name = self.plan.settings.evaluate, self._policy_name(variant)
        if name == "static":
            return StaticLength(wanted.static_length)  # type: ignore[arg-type]
        if name == "threshold":
            return Threshold(wanted.threshold)  # type: ignore[arg-type]
        return FullBlock()


def labels_of(unit: DecodeUnit, prompt: Prompt, policy: str) -> Labels:
    return Labels(
        domain=prompt.domain,
        split=unit.split,
        seed=unit.seed,
        temperature=unit.temperature,
        drafter=unit.variant,
        policy=policy,
    )


def without_sequential_head(drafter: Any) -> Any:
    """The same drafter, sharing its weights, with its sequential and confidence heads switched off."""
    plain = copy.copy(drafter)
    plain._modules = dict(drafter._modules)
    plain.markov_head = None
    plain.confidence_head = None
    return plain


__all__ = ["DecodePlan", "DecodeUnit", "completion_key", "cut", "decode_all", "read_split"]
