"""The engine under closed-loop load: every length policy with a few users, each with one request at a time.

1. A unit is a policy and a number of users; one worker, alone on its device, does one after the other.
2. A user whose answer ends asks the next prompt at once; each asks twice, so that the batch stays full for a while.
3. Every round is kept in `serving/`, labelled with the policy and the number of users; the report counts the steps in
   which all users were there, and sets the replay of recorded rounds beside them (`dspark.serving`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.data.conversations import Prompt
from pipelines.evaluation.round_log import EventLog, Labels
from pipelines.evaluation.serving import policies_of, split_of
from pipelines.settings import Settings
from pipelines.stages.decode_events import (
    DSPARK,
    PLAIN,
    DecodePlan,
    calibration_options,
    open_drafters,
    prompt_request,
)
from pipelines.stages.step_costs import serving_temperature
from pipelines.workers import on_pool, open_target, session
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter

FOLDER = "serving"
ASKED = 2  # requests of each user


@dataclass(frozen=True, kw_only=True)
class ServingUnit:
    """One policy under the load of so many users."""

    policy: str
    users: int
    prompts: tuple[Prompt, ...]

    def __str__(self) -> str:
        return f"serving: {self.policy}, {self.users} users"

    @property
    def file(self) -> str:
        return f"units/{self.policy}-{self.users}.json"


def measure_serving(
    plan: DecodePlan, prompts: Sequence[Prompt], has_confidence: bool, reporter: Reporter
) -> dict[str, Any]:
    """Decode what is not there yet and merge the events; how many units there are."""
    wanted = plan.settings.evaluate.serving
    if wanted is None or not wanted.measured_users:
        return {}
    folder = Folder(Folder(plan.folder).full(FOLDER))
    log = EventLog(folder, plan.circumstances)
    units = [
        ServingUnit(policy=policy, users=users, prompts=tuple(prompts))
        for users in wanted.measured_users
        for policy in policies_of(has_confidence)
    ]
    todo = [unit for unit in units if not folder.exists(unit.file)]
    if todo:
        with (
            session(plan.settings, plan.folder),
            reporter.task("serving under load", len(units), "loads", len(units) - len(todo)) as task,
        ):
            on_pool(
                plan.settings,
                partial(ServingWorker, plan),
                todo,
                workers=1,
                on_result=lambda unit, result: task.advance(1, now=str(unit), **result),
                item_name=str,
            )
    log.merge()
    return {"serving_units": len(units)}


class ServingWorker:
    """Holds the target and the drafter, and serves one load after the other."""

    def __init__(self, plan: DecodePlan) -> None:
        self.plan = plan
        self.target = open_target(plan.settings, plan.facts)
        self.drafter = open_drafters(plan, self.target)[DSPARK][1]
        self.log = EventLog(Folder(plan.folder).full(FOLDER), plan.circumstances)

    def run(self, unit: ServingUnit) -> dict[str, Any]:
        from dspark.decoding.decoder import Decoder, SamplingConfig

        settings = self.plan.settings
        wanted, temperature = settings.evaluate.serving, serving_temperature(settings.evaluate)
        assert wanted is not None
        assert temperature is not None
        proposer, policy = self._drafting(unit.policy, temperature)
        decoder = Decoder(
            self.target,
            proposer,
            sampling=SamplingConfig(temperature=temperature),
            max_rows=unit.users,
            length_policy=policy,
            **calibration_options(self.plan, temperature if policy.needs_confidence else None),
        )
        asked = {}
        for number in range(ASKED * unit.users):
            prompt = unit.prompts[number % len(unit.prompts)]
            name = f"{prompt.prompt_id}#{number}"
            request = prompt_request(
                self.plan, self.target, prompt, prompt.messages, name, wanted.max_new_tokens, seed=number
            )
            if decoder.why_not(request) is None:
                asked[name] = (prompt, request)
        tokens, seconds = 0, 0.0
        for completion in decoder.generate([request for _, request in asked.values()]):
            prompt = asked[completion.request_id][0]
            self.log.append(completion, _labels(settings, unit, prompt, temperature))
            tokens += sum(event.committed for event in completion.rounds)
            seconds += sum((event.draft_ms + event.verify_ms) / event.batch_rows for event in completion.rounds) / 1e3
        self.log.folder.write(unit.file, json.dumps({"policy": unit.policy, "users": unit.users}).encode())
        return {"tokens_per_second": tokens / max(seconds, 1e-9)}

    def _drafting(self, name: str, temperature: float) -> tuple[Any, Any]:
        from dspark.decoding.proposers import NoDrafts
        from dspark.decoding.scheduling import FullBlock
        from dspark.decoding.step_costs import StepCosts
        from pipelines.evaluation.serving import length_policy

        if name == "none":
            return NoDrafts(), FullBlock()
        serving = self.plan.settings.evaluate.serving
        assert serving is not None
        costs = StepCosts.from_dict(self.plan.costs[temperature])
        policy = length_policy(name, costs, static_length=serving.static_length, threshold=serving.threshold)
        assert policy is not None
        return self.drafter, policy


def _labels(settings: Settings, unit: ServingUnit, prompt: Prompt, temperature: float) -> Labels:
    return Labels(
        prompt_id=prompt.prompt_id,
        domain=prompt.domain,
        split=split_of(unit.users),
        seed=settings.run.seed,
        temperature=temperature,
        drafter=PLAIN if unit.policy == "none" else DSPARK,
        policy=unit.policy,
    )
