"""Decoding prompts with a drafter, or without, and keeping every round: what calibration and evaluation share.

A *variant* is what drafts (the drafter, the same without its sequential head, its first slot alone, nothing, another
drafter), a *policy* how much of it is verified. Work is cut into units of prompts that are decoded together. Each
finished completion is one file, and is not decoded again.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.data.chat import TemplateRefuses, answer_message, make_request, render_turn
from pipelines.data.conversations import Message, Prompt, prompt_from_row
from pipelines.drafter_folder import remade, require_target
from pipelines.errors import UserError
from pipelines.evaluation.round_log import EventLog, Labels
from pipelines.json_files import read_jsonl
from pipelines.records import DecodedUnit, read_record
from pipelines.settings import Settings
from pipelines.target_spec import TargetSpec
from pipelines.workers import on_pool, open_target, session

if TYPE_CHECKING:
    from dspark.decoding.target import Target
    from pipelines.progress import Reporter

DSPARK, NO_HEAD, ONE_SLOT, PLAIN = "dspark", "no-sequential-head", "one-slot", "plain"
FULL = "full"


@dataclass(frozen=True, kw_only=True)
class DecodeUnit:
    """Prompts to decode together by one variant and policy at one temperature and seed."""

    variant: str
    policy: str = FULL
    temperature: float
    seed: int
    split: str
    prompts: tuple[Prompt, ...]
    number: int

    @property
    def decoding(self) -> str:
        return self.variant if self.policy == FULL else f"{self.variant}, {self.policy}"

    def __str__(self) -> str:
        return f"{self.split}: {self.decoding}, temperature {self.temperature:g}, seed {self.seed}, part {self.number}"

    @property
    def file(self) -> str:
        """Where the unit's stopwatch record and what it skipped are kept, written when all its completions are."""
        name = self.decoding.replace(", ", "-")
        return f"units/{name}-t{self.temperature:g}-s{self.seed}-{self.number:04d}.json"


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What every unit of a stage has in common; picklable."""

    settings: Settings
    facts: TargetSpec
    folder: str
    circumstances: dict[str, Any]
    drafter: str | None
    max_new_tokens: int
    rows: int
    baselines: dict[str, str] = field(default_factory=dict)  # name: folder
    calibration: dict[str, Any] | None = None  # the record that `calibrate` left
    costs: dict[float, dict[str, Any]] = field(default_factory=dict)  # step costs by decoding temperature


def read_split(path: Path, split: str) -> list[Prompt]:
    """The held-out prompts that `regenerate` laid beside the conversations."""
    prompts = (prompt_from_row(row, place, split=split) for place, row in read_jsonl(path))
    return [prompt for prompt in prompts if prompt is not None]


def cut(
    prompts: Sequence[Prompt],
    *,
    variant: str,
    temperature: float,
    seed: int,
    split: str,
    rows: int,
    policy: str = FULL,
) -> list[DecodeUnit]:
    """Units of four batches each: enough for rows to be refilled, little to lose."""
    size = 4 * rows
    return [
        DecodeUnit(
            variant=variant,
            policy=policy,
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
                task.advance(len(unit.prompts), now=f"{unit.decoding} T={unit.temperature:g}", **result)

            on_pool(
                plan.settings,
                partial(DecodeWorker, plan),
                todo,
                workers=workers,
                on_result=finished,
                item_name=str,
            )
    log.merge()
    cure = "remove it and run the same command again, which decodes these prompts anew"
    return [read_record(log.folder, unit.file, DecodedUnit, cure).model_dump() for unit in units]


def open_drafters(plan: DecodePlan, target: Target) -> dict[str, tuple[Target, Any]]:
    """By variant: what drafts, and the target as it reads it. A baseline may capture other layers of the same target.

    Raises UserError for a baseline that is not a drafter for this target.
    """
    from dspark.decoding.proposers import ProposerError, proposer_for
    from dspark.decoding.target import Target
    from dspark.models.checkpoint import load_drafter

    options: dict[str, Any] = {"device": target.device, "dtype": target.dtype, "target": target}
    found: dict[str, tuple[Target, Any]] = {PLAIN: (target, None)}
    if plan.drafter is not None:
        drafter = load_drafter(plan.drafter, needs_manifest=True, cure=remade(plan.drafter), **options)
        asked = plan.facts.contract(plan.settings, with_block=True)["block_size"]
        if drafter.block_size != asked:
            raise UserError(
                f"the drafter in {plan.drafter} has blocks of {drafter.block_size}, these settings ask for {asked}: "
                "set drafter.block_size to the checkpoint's"
            )
        found |= {DSPARK: (target, drafter), ONE_SLOT: (target, drafter)}
        found[NO_HEAD] = (target, without_sequential_head(drafter))
    for name, folder in plan.baselines.items():
        try:
            drafter = load_drafter(folder, **options)
            layers = tuple(drafter.config.target_layer_ids)
            seen = (
                target
                if layers == target.layer_ids
                else Target(target.model, target.tokenizer, target_layer_ids=layers, name=target.name)
            )
            proposer_for(drafter, seen)
            require_target(folder, drafter.config, plan.facts, plan.settings)
        except (ProposerError, ValueError, OSError) as error:
            raise UserError(f"evaluate.baselines.{name}: {folder} cannot draft for this target: {error}") from error
        found[name] = (seen, drafter)
    return found


def prompt_request(
    plan: DecodePlan, target: Target, prompt: Prompt, messages: Sequence[Message], name: str, room: int, *, seed: int
) -> Any:
    """The decoder's request for a conversation so far; thinking is as the prompt's id decides."""
    settings = plan.settings
    ids = render_turn(target.tokenizer, prompt, messages, settings)
    return make_request(name, ids, room, plan.facts, settings.run.seed + seed)


def calibration_options(plan: DecodePlan, temperature: float | None) -> dict[str, Any]:
    """The decoder's options for confidences of DSpark at a decoding temperature; empty for other drafters (None)."""
    from dspark.calibration import slot_calibration

    found = None if temperature is None else slot_calibration(plan.calibration, temperature)
    return {} if found is None else {"temperatures": found.temperatures, "shifts": found.shifts}


class DecodeWorker:
    """Holds the target and the drafters, and decodes one unit after the other."""

    def __init__(self, plan: DecodePlan) -> None:
        self.plan = plan
        self.target = open_target(plan.settings, plan.facts)
        self.drafters = open_drafters(plan, self.target)
        self.log = EventLog(plan.folder, plan.circumstances)

    def run(self, unit: DecodeUnit) -> dict[str, Any]:
        from dspark.decoding.decoder import Decoder, SamplingConfig

        plan = self.plan
        target, drafter = self.drafters[unit.variant]
        decoder = Decoder(
            target,
            drafter,
            sampling=SamplingConfig(temperature=unit.temperature),
            max_rows=plan.rows,
            length_policy=self._policy(unit),
            **calibration_options(plan, unit.temperature if unit.variant == DSPARK else None),
            record_gaps=unit.temperature == 0,
        )
        said: dict[str, list[Any]] = {prompt.prompt_id: [] for prompt in unit.prompts}
        tokens, seconds, skipped = 0, 0.0, {}
        for turn in range(max(len(prompt.turns) for prompt in unit.prompts)):
            asked: dict[str, tuple[Prompt, Any]] = {}
            for prompt in unit.prompts:
                if turn >= len(prompt.turns) or prompt.prompt_id in skipped:
                    continue
                said[prompt.prompt_id] += prompt.turns[turn]
                try:
                    request = self._request(unit, prompt, said[prompt.prompt_id], turn)
                except TemplateRefuses as error:  # its own answer as history
                    skipped[prompt.prompt_id] = str(error)
                    continue
                if (why := decoder.why_not(request)) is not None:
                    skipped[prompt.prompt_id] = why
                    continue
                # An earlier process may have finished some prompts of this unit.
                if (kept := self.log.kept(request.request_id, labels_of(unit, prompt, turn))) is not None:
                    said[prompt.prompt_id].append(self._answer(prompt, request, kept[0]))
                    tokens, seconds = tokens + len(kept[0]), seconds + kept[1]
                    continue
                asked[request.request_id] = prompt, request
            began = time.perf_counter()
            for completion in decoder.generate([request for _, request in asked.values()]):
                took = time.perf_counter() - began
                seconds += took
                prompt, request = asked[completion.request_id]
                tokens += len(completion.output_ids)
                said[prompt.prompt_id].append(self._answer(prompt, request, completion.output_ids))
                self.log.append(completion, labels_of(unit, prompt, turn), stopwatch=took)
                began = time.perf_counter()
        record = {
            "drafter": unit.decoding,
            "temperature": unit.temperature,
            "tokens": tokens,
            "seconds": seconds,
            "max_rows": plan.rows,
            "skipped": skipped,
        }
        self.log.folder.write(unit.file, json.dumps(record, indent=1).encode())
        return {"tokens_per_second": tokens / max(seconds, 1e-9)}

    def _answer(self, prompt: Prompt, request: Any, output_ids: Sequence[int]) -> Message:
        """What the next turn of a conversation goes on from."""
        stop, tokenizer = self.plan.facts.stop_token_ids, self.target.tokenizer
        return dict(answer_message(tokenizer, request.prompt_ids, output_ids, stop, prompt.tools))

    def _request(self, unit: DecodeUnit, prompt: Prompt, messages: Sequence[Message], turn: int) -> Any:
        name, room = prompt.request_id(turn), self.plan.max_new_tokens
        return prompt_request(self.plan, self.target, prompt, messages, name, room, seed=unit.seed)

    def _policy(self, unit: DecodeUnit) -> Any:
        from dspark.decoding.scheduling import StaticLength, policy_named
        from dspark.decoding.step_costs import StepCosts

        if unit.variant == ONE_SLOT:
            return StaticLength(1)
        wanted, costs = self.plan.settings.evaluate, self.plan.costs.get(unit.temperature)
        return policy_named(
            unit.policy,
            length=wanted.static_length,
            level=wanted.threshold,
            cost=None if costs is None else StepCosts.from_dict(costs),
        )


def labels_of(unit: DecodeUnit, prompt: Prompt, turn: int) -> Labels:
    return Labels(
        prompt_id=prompt.prompt_id,
        turn=turn,
        domain=prompt.domain,
        split=unit.split,
        seed=unit.seed,
        temperature=unit.temperature,
        drafter=unit.variant,
        policy=unit.policy,
    )


def without_sequential_head(drafter: Any) -> Any:
    """The same drafter, sharing its weights, with its sequential and confidence heads switched off."""
    plain = copy.copy(drafter)
    plain._modules = dict(drafter._modules)
    plain.markov_head = None
    plain.confidence_head = None
    return plain
