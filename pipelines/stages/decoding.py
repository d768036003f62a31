"""Decoding prompts with a drafter, or without, and keeping every round: what calibration and evaluation share.

A *variant* is what drafts (the drafter, the same without its sequential head, its first slot alone, nothing, another
drafter), a *policy* how much of it is verified. A work item is some prompts that are decoded together. Each finished
completion is one file, and is not decoded again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dspark.calibration import slot_calibration
from dspark.decoding.decoder import Decoder, SamplingConfig
from dspark.decoding.proposers import ProposerError, proposer_for
from dspark.decoding.scheduling import StaticLength, policy_named
from dspark.decoding.step_costs import StepCosts
from dspark.decoding.target import Target
from dspark.models.checkpoint import load_drafter
from pipelines.data.chat import TemplateRefuses, answer_message, make_request, render_turn
from pipelines.data.conversations import Prompt, prompt_from_row
from pipelines.data.messages import Message
from pipelines.drafter_folder import remade, require_target
from pipelines.errors import UserError
from pipelines.evaluation.round_log import EventLog, Labels
from pipelines.json_files import read_jsonl, write_json
from pipelines.settings import Settings
from pipelines.settings.schema import CalibrateSettings, EvaluateSettings
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.workers import on_pool, open_target, session

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run

DSPARK, NO_HEAD, ONE_SLOT, PLAIN = "dspark", "no-sequential-head", "one-slot", "plain"
FULL = "full"


class WorkItem(Protocol):
    """What a worker does at once; `file` is written when it is done, `size` is shown as progress."""

    @property
    def file(self) -> str: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class DecodeItem:
    """Prompts to decode together by one variant and policy at one temperature and seed."""

    variant: str
    policy: str = FULL
    temperature: float
    seed: int
    split: str
    prompts: tuple[Prompt, ...]
    number: int = 0

    @property
    def decoding(self) -> str:
        return self.variant if self.policy == FULL else f"{self.variant}, {self.policy}"

    def __str__(self) -> str:
        return f"{self.split}: {self.decoding}, temperature {self.temperature:g}, seed {self.seed}, part {self.number}"

    @property
    def size(self) -> int:
        return len(self.prompts)

    @property
    def file(self) -> str:
        """Where the stopwatch record and what was skipped are kept, written when all completions are."""
        name = self.decoding.replace(", ", "-")
        return f"items/{name}-t{self.temperature:g}-s{self.seed}-{self.number:04d}.json"

    def labels(self, prompt: Prompt, turn: int) -> Labels:
        return Labels(
            prompt_id=prompt.prompt_id,
            turn=turn,
            domain=prompt.domain,
            split=self.split,
            seed=self.seed,
            temperature=self.temperature,
            drafter=self.variant,
            policy=self.policy,
        )


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What every work item of a stage has in common; picklable."""

    settings: Settings
    spec: TargetSpec
    folder: str
    circumstances: dict[str, Any]
    drafter: str | None  # the run's own; None where only the others decode
    max_new_tokens: int
    batch_size: int
    baselines: dict[str, str] = field(default_factory=dict)  # name: folder
    named_by: str = "evaluate.baselines."  # what a message puts before a baseline's name
    calibration: dict[str, Any] | None = None  # the record that `calibrate` left
    costs: dict[float, dict[str, Any]] = field(default_factory=dict)  # step costs by decoding temperature


def make_plan(run: Run, stage: str, section: CalibrateSettings | EvaluateSettings, **more: Any) -> DecodePlan:
    """The plan of a stage, which decodes with the run's drafter as its section of the settings says."""
    return DecodePlan(
        settings=run.settings,
        spec=resolve_target(run.settings),
        folder=run.location(stage),
        circumstances={"identity": run.identity(stage)},
        drafter=str(Path(run.location("train"), "final")),
        max_new_tokens=section.max_new_tokens,
        batch_size=section.batch_size,
        **more,
    )


def read_split(path: Path, split: str) -> list[Prompt]:
    """The held-out prompts that `regenerate` laid beside the conversations."""
    prompts = (prompt_from_row(row, place, split=split) for place, row in read_jsonl(path))
    return [prompt for prompt in prompts if prompt is not None]


def work_items(
    section: CalibrateSettings | EvaluateSettings,
    prompts: Sequence[Prompt],
    split: str,
    decodings: Callable[[float], Sequence[tuple[str, str]]],
) -> list[DecodeItem]:
    """Every temperature, seed and decoding (variant, policy), in items of four batches each.

    So rows are refilled, and little is lost. Greedy answers are the same whatever the seed.
    """
    size = 4 * section.batch_size
    return [
        DecodeItem(
            variant=variant,
            policy=policy,
            temperature=temperature,
            seed=seed,
            split=split,
            prompts=tuple(prompts[start : start + size]),
            number=number,
        )
        for temperature in section.temperatures
        for seed in (section.seeds if temperature > 0 else section.seeds[:1])
        for variant, policy in decodings(temperature)
        for number, start in enumerate(range(0, len(prompts), size))
    ]


def decode_all(
    plan: DecodePlan,
    make_worker: Callable[[DecodePlan], Any],
    items: Sequence[WorkItem],
    *,
    workers: int,
    what: str,
    unit: str,
    reporter: Reporter,
) -> None:
    """Decode what is not there yet, and merge the events."""
    log = EventLog(plan.folder, plan.circumstances)
    todo = [item for item in items if not log.folder.exists(item.file)]
    if todo:
        total = sum(item.size for item in items)
        done = total - sum(item.size for item in todo)
        with session(plan.settings, plan.folder), reporter.task(what, total, unit, done) as task:
            on_pool(
                plan.settings,
                partial(make_worker, plan),
                todo,
                workers=workers,
                on_result=lambda item, result: task.advance(item.size, now=str(item), **result),
                item_name=str,
            )
    log.merge()


def open_drafters(plan: DecodePlan, target: Target) -> dict[str, tuple[Target, Any]]:
    """By variant: what drafts, and the target as it reads it. A baseline may capture other layers of the same target.

    Raises UserError for a baseline that is not a drafter for this target.
    """
    options: dict[str, Any] = {"device": target.device, "dtype": target.dtype, "target": target}
    found: dict[str, tuple[Target, Any]] = {PLAIN: (target, None)}
    if plan.drafter is not None:
        drafter = load_drafter(plan.drafter, needs_manifest=True, cure=remade(plan.drafter), **options)
        asked = plan.spec.contract(plan.settings, with_block=True)["block_size"]
        if drafter.block_size != asked:
            raise UserError(
                f"the drafter in {plan.drafter} has blocks of {drafter.block_size}, these settings ask for {asked}: "
                "set drafter.block_size to the checkpoint's"
            )
        own = {DSPARK: drafter, ONE_SLOT: drafter, NO_HEAD: without_sequential_head(drafter)}
        found |= {variant: (target, one) for variant, one in own.items()}
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
            require_target(folder, drafter.config, plan.spec, plan.settings)
        except (ProposerError, ValueError, OSError) as error:
            raise UserError(f"{plan.named_by}{name}: {folder} cannot draft for this target: {error}") from error
        found[name] = (seen, drafter)
    return found


class DecodeWorker:
    """Holds the target and the drafters, and decodes one item after the other."""

    def __init__(self, plan: DecodePlan) -> None:
        self.plan = plan
        self.target = open_target(plan.settings, plan.spec)
        self.drafters = open_drafters(plan, self.target)
        self.log = EventLog(plan.folder, plan.circumstances)

    def request(self, prompt: Prompt, messages: Sequence[Message], name: str, max_new_tokens: int, seed: int) -> Any:
        """The decoder's request for a conversation so far; thinking is as the prompt's id decides."""
        settings = self.plan.settings
        ids = render_turn(self.target.tokenizer, prompt, messages, settings)
        return make_request(name, ids, max_new_tokens, self.plan.spec, settings.run.seed + seed)

    def calibration(self, temperature: float) -> dict[str, Any]:
        """The decoder's options for DSpark's confidences at a decoding temperature."""
        found = slot_calibration(self.plan.calibration, temperature)
        return {} if found is None else {"temperatures": found.temperatures, "shifts": found.shifts}

    def run(self, item: DecodeItem) -> dict[str, Any]:
        plan = self.plan
        target, drafter = self.drafters[item.variant]
        decoder = Decoder(
            target,
            drafter,
            sampling=SamplingConfig(temperature=item.temperature),
            max_rows=plan.batch_size,
            length_policy=self._policy(item),
            **(self.calibration(item.temperature) if item.variant == DSPARK else {}),
            record_gaps=item.temperature == 0,
        )
        said: dict[str, list[Any]] = {prompt.prompt_id: [] for prompt in item.prompts}
        tokens, seconds, skipped = 0, 0.0, {}
        for turn in range(max(len(prompt.turns) for prompt in item.prompts)):
            asked: dict[str, tuple[Prompt, Any]] = {}
            for prompt in item.prompts:
                if turn >= len(prompt.turns) or prompt.prompt_id in skipped:
                    continue
                said[prompt.prompt_id] += prompt.turns[turn]
                name, history = prompt.request_id(turn), said[prompt.prompt_id]
                try:
                    request = self.request(prompt, history, name, plan.max_new_tokens, item.seed)
                except TemplateRefuses as error:  # its own answer as history
                    skipped[prompt.prompt_id] = str(error)
                    continue
                if (why := decoder.why_not(request)) is not None:
                    skipped[prompt.prompt_id] = why
                    continue
                # An earlier process may have finished some prompts of this item.
                if (kept := self.log.kept(name, item.labels(prompt, turn))) is not None:
                    history.append(self._answer(prompt, request, kept[0]))
                    tokens, seconds = tokens + len(kept[0]), seconds + kept[1]
                    continue
                asked[name] = prompt, request
            began = time.perf_counter()
            for completion in decoder.generate([request for _, request in asked.values()]):
                took = time.perf_counter() - began
                seconds += took
                prompt, request = asked[completion.request_id]
                tokens += len(completion.output_ids)
                said[prompt.prompt_id].append(self._answer(prompt, request, completion.output_ids))
                self.log.append(completion, item.labels(prompt, turn), stopwatch=took)
                began = time.perf_counter()
        record = {
            "drafter": item.decoding,
            "temperature": item.temperature,
            "tokens": tokens,
            "seconds": seconds,
            "max_rows": plan.batch_size,
            "skipped": skipped,
        }
        write_json(self.log.folder, item.file, record)
        return {"tokens_per_second": tokens / max(seconds, 1e-9)}

    def _answer(self, prompt: Prompt, request: Any, output_ids: Sequence[int]) -> Message:
        """What the next turn of a conversation goes on from."""
        stop, tokenizer = self.plan.spec.stop_token_ids, self.target.tokenizer
        return dict(answer_message(tokenizer, request.prompt_ids, output_ids, stop, prompt.tools))

    def _policy(self, item: DecodeItem) -> Any:
        if item.variant == ONE_SLOT:
            return StaticLength(1)
        section, costs = self.plan.settings.evaluate, self.plan.costs.get(item.temperature)
        return policy_named(
            item.policy,
            length=section.static_length,
            level=section.threshold,
            cost=None if costs is None else StepCosts.from_dict(costs),
        )


def without_sequential_head(drafter: Any) -> Any:
    """The same drafter, sharing its weights, with its sequential and confidence heads switched off."""
    without = copy.copy(drafter)
    without._modules = dict(drafter._modules)
    without.markov_head = None
    without.confidence_head = None
    return without
