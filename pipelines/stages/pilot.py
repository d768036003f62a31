"""Find out on a few conversations what of the target's states is worth keeping, before all of them are captured.

1. Take a share of the conversations, spread evenly, and cache their states exactly.
2. Train a pilot drafter of each algorithm on them; a drafter sees the states only through its context projection.
3. A worker turns the pilots' projections into components, strongest first, for a projected cache to keep.
4. Where a codec is automatic, it also codes conversations that no pilot has seen with every candidate, measures how far
   acceptance rates move, and takes the smallest codec within `cache.acceptance_bound`.

`pilot/` holds the exact `cache/`, a folder an algorithm, `components.safetensors` and `findings.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save

from dspark.models.checkpoint import load_drafter
from dspark.registry import algorithms
from pipelines.data.conversations import evenly_spaced
from pipelines.drafter_folder import remade
from pipelines.errors import UserError
from pipelines.json_files import write_json
from pipelines.settings import Settings, settings_from_dict
from pipelines.stages.build_cache import build, count_components, plan_cache
from pipelines.stages.capture import COMPONENTS, CaptureWorker, Conversation
from pipelines.stages.pilot_candidates import choose
from pipelines.stages.train import count_steps, drafter_fields, require_shared_folder, train_on
from pipelines.target_spec import resolve_target
from pipelines.training.log import LOG, read_log
from pipelines.workers import on_pool, session
from storage.cache.target_cache import CodecSpec, TargetCache, is_finished
from storage.codecs.components import leading_components
from storage.files.filesystems import Folder
from storage.order import steps_per_epoch

if TYPE_CHECKING:
    import torch

    from pipelines.progress import Reporter
    from pipelines.runs.run import Run

FINDINGS = "findings.json"
EXACT = {part: CodecSpec(name="bf16") for part in ("features", "teacher")}
MIN_CONVERSATIONS = 24  # of a pilot, or all there are
MIN_STEPS = 96  # by more epochs; a weaker pilot says too little about the components
MEASURED_TOKENS = 8192  # that the candidates are measured on
KEPT_COMPONENTS = 3.0  # hidden sizes
MIN_COMPONENT_TOKENS, TOKENS_A_CHANNEL = 16_384, 8  # that the components' statistics come from, where there are as many


def pilot_settings(settings: Settings, algorithm: str, conversations: tuple[int, int] | None = None) -> Settings:
    """The run's settings for a pilot of this algorithm, its own loss and parts where it is not the drafter's.

    With the number of its `conversations` and of all there are, as many epochs as MIN_STEPS takes, but no more
    steps than the training itself has.
    """
    values = settings.to_dict()
    train, pilot = values["train"], settings.pilot
    if algorithm != settings.drafter.algorithm:
        train.pop("loss")
        drafter = values["drafter"]
        drafter |= {"algorithm": algorithm, "options": {}, **algorithms[algorithm].settings}
        if drafter["initial_weights"] not in ("random", "target"):
            drafter["initial_weights"] = "target"
    train |= {"validation_samples": 0, "load_best_model_at_end": False}
    train["num_train_epochs"] = pilot.num_train_epochs or settings.train.num_train_epochs
    train["global_batch_size"] = min(pilot.global_batch_size, settings.train.global_batch_size)
    train["max_steps"] = pilot.max_steps or settings.train.max_steps
    if conversations is not None and pilot.num_train_epochs is None:
        sample, every = conversations
        steps = min(MIN_STEPS, count_steps(settings, every))
        train["num_train_epochs"] = max(
            settings.train.num_train_epochs, steps / steps_per_epoch(sample, train["global_batch_size"])
        )
    return settings_from_dict(values)


def algorithms_of(settings: Settings) -> tuple[str, ...]:
    """Whose pilots are trained; none for a cache whose features are kept whole."""
    if not settings.cache.trains_pilot:
        return ()
    return settings.pilot.algorithms or (settings.drafter.algorithm,)


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """The sample, everything that decides a pilot's steps, and what is chosen by which bound."""
    spec, cache = resolve_target(settings), settings.cache
    pilots = {name: drafter_fields(pilot_settings(settings, name)) for name in algorithms_of(settings)}
    fields: dict[str, Any] = {
        "contract": spec.contract(settings, with_block=False),
        "dtype": settings.target.dtype,
        "max_length": cache.max_length,
        "sample": settings.pilot.model_dump(include={"share", "max_tokens"}),
        "pilots": pilots,
        "seed": settings.run.seed,
    }
    if automatic := cache.automatic_codecs:
        fields["automatic"] = {"codecs": automatic, "bound": cache.acceptance_bound, "temperature": cache.temperature}
    return fields


def check(settings: Settings) -> None:
    """Raises UserError for a place where a pilot cannot be trained, and for one that the target cannot have."""
    from pipelines.training.model import require_drafter

    if settings.cache.trains_pilot:
        require_shared_folder(settings)
    for algorithm in algorithms_of(settings):
        require_drafter(pilot_settings(settings, algorithm), resolve_target(settings))


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `pilot/`."""
    spec = resolve_target(settings)
    root, conversations = run.location("pilot"), Folder(run.location("regenerate"))
    inputs = {"regenerate": run.identity("regenerate")}
    every, _ = plan_cache(settings, spec, conversations, EXACT, inputs)
    sample = pilot_sample(settings, every)
    seen = {row.sample_id for row in sample}
    steps, lengths = {}, {}
    with session(settings, root):
        if algorithms_of(settings):
            cache = f"{root}/cache"
            if not is_finished(cache):
                rows, plan = plan_cache(settings, spec, conversations, EXACT, inputs, choose=lambda _: list(sample))
                build(settings, spec, cache, rows, plan, reporter)
            for algorithm in algorithms_of(settings):
                of = pilot_settings(settings, algorithm, (len(sample), len(every)))
                output = Path(run.directory.path("pilot"), algorithm)
                steps[algorithm] = count_steps(of, len(sample))
                if not Folder(output).exists("final/contract.json"):  # what a training writes last
                    train_on(of, spec, cache, output, reporter, name=f"{algorithm} pilot")
                lengths[algorithm] = read_log(output / LOG)[-1].get("tau_probabilistic")
        unseen = [row for row in every if row.sample_id not in seen] or list(sample)
        tokens = sum(len(row.input_ids) for row in unseen)
        unseen = evenly_spaced(unseen, max(2, MEASURED_TOKENS * len(unseen) // tokens))
        found: dict[str, Any] = {}
        on_pool(
            settings,
            partial(PilotWorker, settings, spec, root),
            [FindItem(unseen=tuple(unseen), sample=tuple(sample))],
            workers=1,
            on_result=lambda item, result: found.update(result),
            item_name=lambda item: "components and candidates",
        )
    write_json(Folder(root), FINDINGS, found)
    return {
        "conversations": len(sample),
        "tokens": sum(len(row.input_ids) for row in sample),
        "steps": steps,
        "expected_accepted_length": lengths,
        **found,
    }


def pilot_sample(settings: Settings, rows: Sequence[Conversation]) -> list[Conversation]:
    """The share of the conversations that the pilot works on, spread evenly.

    Raises UserError where a pilot is to be trained and they are not two.
    """
    section = settings.pilot
    tokens = sum(len(row.input_ids) for row in rows)
    count = max(MIN_CONVERSATIONS, round(section.share * len(rows)))
    sample = evenly_spaced(rows, max(1, min(count, len(rows), round(len(rows) * section.max_tokens / tokens))))
    if algorithms_of(settings) and len(sample) < 2:
        raise UserError(
            f"a pilot takes two conversations at least, and there is {len(sample)} (of {len(rows)}; pilot.max_tokens="
            f"{section.max_tokens}): set cache.hidden_states_codec to a codec without a pilot (transform, int8, bf16)"
        )
    return sample


@dataclass(frozen=True, kw_only=True)
class FindItem:
    """Conversations that no pilot has seen, to measure candidates on, and those that the pilots were trained on."""

    unseen: tuple[Conversation, ...]
    sample: tuple[Conversation, ...]


class _CachedRows(Sequence[tuple["torch.Tensor", bool]]):
    """Exact states of some rows of a cache, read when they are looked at."""

    def __init__(self, cache: TargetCache, rows: range) -> None:
        self._cache, self._rows = cache, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._cache.row(self._rows[index]).hidden_states, True


class PilotWorker(CaptureWorker):
    """Holds the target; `root` is the pilot's folder."""

    def run(self, item: Any) -> dict[str, Any]:
        drafters = self._drafters()
        if drafters:
            self._write_components(item, drafters)
        parts = self.settings.cache.automatic_codecs
        return choose(self, item.unseen, drafters, parts) if parts else {}

    def _drafters(self) -> dict[str, Any]:
        folder = Folder(self.root)
        return {
            algorithm: load_drafter(
                final := folder.full(f"{algorithm}/final"),
                device=self.target.device,
                dtype="float32",
                needs_manifest=True,
                cure=remade(final),
            )
            for algorithm in algorithms_of(self.settings)
        }

    def _write_components(self, item: FindItem, drafters: dict[str, Any]) -> None:
        cache = TargetCache.open(f"{self.root}/cache")
        width = self.target.hidden_size * len(self.target.layer_ids)
        tokens = sum(len(row.input_ids) for row in item.sample)
        step = max(1, tokens // max(MIN_COMPONENT_TOKENS, TOKENS_A_CHANNEL * width))
        sample = _CachedRows(cache, range(0, len(cache), step))
        # More than the cache asks for: another number then needs no other pilot.
        kept = max(KEPT_COMPONENTS, self.settings.cache.components)
        count = count_components(resolve_target(self.settings), kept)
        projection, shares = leading_components([drafter.fc.weight for drafter in drafters.values()], sample, count)
        Folder(self.root).write(COMPONENTS, save({"projection": projection, "shares": shares}))
