"""The engine under closed-loop load: every length policy with a few users, each with one request at a time.

1. A work item is a policy and a number of users; one worker, alone on its device, does one after the other.
2. A user whose answer ends asks the next prompt at once; each asks twice, so that the batch stays full for a while.
3. Every round is kept in `serving/`, labelled with the policy and the number of users; the report counts the steps in
   which all users were there, and sets the replay of recorded rounds beside them (`dspark.serving`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dspark.decoding.decoder import Decoder, SamplingConfig
from dspark.decoding.proposers import NoDrafts
from dspark.decoding.scheduling import FullBlock
from dspark.decoding.step_costs import StepCosts
from pipelines.data.conversations import Prompt
from pipelines.evaluation.round_log import Labels
from pipelines.evaluation.serving import length_policy, policies_of, split_of
from pipelines.json_files import write_json
from pipelines.stages.decoding import DSPARK, PLAIN, DecodePlan, DecodeWorker, decode_all
from pipelines.stages.step_costs import serving_temperature
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter

FOLDER = "serving"
ASKED = 2  # requests of each user


@dataclass(frozen=True, kw_only=True)
class ServingItem:
    """One policy under the load of so many users."""

    policy: str
    users: int
    prompts: tuple[Prompt, ...]
    size = 1

    def __str__(self) -> str:
        return f"serving: {self.policy}, {self.users} users"

    @property
    def file(self) -> str:
        return f"items/{self.policy}-{self.users}.json"


def measure_serving(
    plan: DecodePlan, prompts: Sequence[Prompt], has_confidence: bool, reporter: Reporter
) -> dict[str, Any]:
    """Decode what is not there yet and merge the events; how many loads there are."""
    serving = plan.settings.evaluate.serving
    if serving is None or not serving.measured_users:
        return {}
    items = [
        ServingItem(policy=policy, users=users, prompts=tuple(prompts))
        for users in serving.measured_users
        for policy in policies_of(has_confidence)
    ]
    below = replace(plan, folder=Folder(plan.folder).full(FOLDER))
    decode_all(below, ServingWorker, items, workers=1, what="serving under load", unit="loads", reporter=reporter)
    return {"serving_loads": len(items)}


class ServingWorker(DecodeWorker):
    """Serves one load after the other."""

    def run(self, item: ServingItem) -> dict[str, Any]:  # type: ignore[override]
        settings, section = self.plan.settings, self.plan.settings.evaluate
        serving, temperature = section.serving, serving_temperature(section)
        assert serving is not None
        assert temperature is not None
        costs = StepCosts.from_dict(self.plan.costs[temperature])
        policy = (
            length_policy(item.policy, costs, static_length=section.static_length, threshold=section.threshold)
            or FullBlock()
        )
        decoder = Decoder(
            self.target,
            NoDrafts() if item.policy == "none" else self.drafters[DSPARK][1],
            sampling=SamplingConfig(temperature=temperature),
            max_rows=item.users,
            length_policy=policy,
            **(self.calibration(temperature) if policy.needs_confidence else {}),
        )
        asked = {}
        for number in range(ASKED * item.users):
            prompt = item.prompts[number % len(item.prompts)]
            name = f"{prompt.prompt_id}#{number}"
            request = self.request(prompt, prompt.messages, name, serving.max_new_tokens, number)
            if decoder.why_not(request) is None:
                asked[name] = (prompt, request)
        tokens, seconds = 0, 0.0
        for completion in decoder.generate([request for _, request in asked.values()]):
            prompt = asked[completion.request_id][0]
            labels = Labels(
                prompt_id=prompt.prompt_id,
                domain=prompt.domain,
                split=split_of(item.users),
                seed=settings.run.seed,
                temperature=temperature,
                drafter=PLAIN if item.policy == "none" else DSPARK,
                policy=item.policy,
            )
            self.log.append(completion, labels)
            tokens += sum(event.committed for event in completion.rounds)
            seconds += sum((event.draft_ms + event.verify_ms) / event.batch_rows for event in completion.rounds) / 1e3
        write_json(self.log.folder, item.file, {"policy": item.policy, "users": item.users})
        return {"tokens_per_second": tokens / max(seconds, 1e-9)}
