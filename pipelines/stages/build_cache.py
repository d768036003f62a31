"""Run the target over the conversations and keep what it thinks, compressed, in the target cache.

1. Cut conversations to the length limit, order them, and plan the cache: rows, shards, codecs (the pilot's choice
   where they are automatic), contract.
2. If a codec has statistics to fit, one worker captures a sample of rows and fits it; then the cache is created.
3. Ray workers capture shard after shard, in batches of like length, and write each as one committed shard.
   The worker then audits some of its rows: it runs the target again, alone, over what a reader gets, and compares the
   teacher's distribution.
4. Audit what an interrupted build left unaudited.
5. Close the cache: from here on it opens with `datasets.load_from_disk`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipelines.data.answers import generated_sample, supervised_tokens
from pipelines.data.conversations import evenly_spaced
from pipelines.errors import UserError
from pipelines.plugins import plugin_identity
from pipelines.settings import Settings
from pipelines.stages.capture import CaptureItem, CaptureWorker, Conversation, FitItem
from pipelines.stages.regenerate import read_conversations
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.workers import on_pool, session
from storage.cache.repair import discard_damaged
from storage.cache.target_cache import CachePlan, CodecSpec, TargetCache, create_or_resume, finish
from storage.codecs.registry import codec_class
from storage.errors import CacheCorrupt
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run
    from storage.codecs.base import Codec

# Tokens whose states codecs are fitted on: statistics over all captured channels want several for each of them.
MIN_FIT_TOKENS, FIT_TOKENS_A_CHANNEL = 8192, 4
# Largest mean total variation between a reader's teacher and the live target. A layer too early, a missing norm or
# another row's states give 0.5 and more; coding gives a few hundredths.
AUDIT_BOUND_EXACT, AUDIT_BOUND_LOSSY = 0.03, 0.15


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """The contract, the codecs, and how rows are cut and ordered; what the pilot found comes with the inputs."""
    spec, cache = resolve_target(settings), settings.cache
    fields: dict[str, Any] = {
        "contract": spec.contract(settings, with_block=False),
        "dtype": settings.target.dtype,
        "hidden_states_codec": cache.hidden_states_codec,
        "hidden_states_options": cache.hidden_states_options,
        "teacher_codec": cache.teacher_codec,
        "teacher_options": cache.teacher_options,
        "max_length": cache.max_length,
        "tokens_per_shard": cache.tokens_per_shard,
        **plugin_identity(settings.plugins, _named_codecs(settings)),
    }
    if cache.hidden_states_codec == "projected":
        fields["components"] = cache.components
    return fields


def _named_codecs(settings: Settings) -> list[type[Codec]]:
    names = (settings.cache.codec_of(part)[0] for part in ("features", "teacher"))
    return [codec_class(name) for name in names if name != "auto"]


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `cache/`."""
    spec = resolve_target(settings)
    root, conversations = run.location("cache"), Folder(run.location("regenerate"))
    chosen = choose_codecs(settings, spec, run)
    inputs = {name: run.identity(name) for name in run.stages["cache"].inputs}
    rows, plan = plan_cache(settings, spec, conversations, chosen, inputs)
    with session(settings, root):
        pilot = run.location("pilot") if settings.cache.trains_pilot else None
        audit = build(settings, spec, root, rows, plan, reporter, pilot=pilot)
    info = TargetCache.open(root).info()
    return {
        "rows": info["rows"],
        "tokens": info["tokens"],
        "bytes": info["bytes"],
        "bytes_per_token": info["bytes_per_token"]["all"],
        "reference_bytes_per_token": info["raw_bytes_per_token"],
        "times_smaller": info["times_smaller"],
        "codecs": {part: spec.to_dict() for part, spec in chosen.items()},
        "skipped": info["skipped"],
        "shortened": info["shortened"],
        "audit": audit,
    }


def choose_codecs(settings: Settings, spec: TargetSpec, run: Run) -> dict[str, CodecSpec]:
    """The codecs of `features` and `teacher`: as set, or as the pilot chose them."""
    section = settings.cache
    chosen: dict[str, CodecSpec] = {}
    for part in ("features", "teacher"):
        name, options = section.codec_of(part)
        if name == "auto":
            chosen[part] = CodecSpec(**run.result("pilot")["chosen"][part])
        elif name == "projected":
            chosen[part] = CodecSpec(
                name=name, settings={"directions": count_components(spec, section.components), **options}
            )
        else:
            chosen[part] = CodecSpec(name=name, settings=options)
    return chosen


def take_out_damage(run: Run, reporter: Reporter) -> None:
    """Check every byte of the run's cache and take out the shards that are damaged, for the stage to build again.

    Where something is damaged that every row depends on, the whole cache goes to `damaged/`. Raises UserError if there
    is no cache of these settings.
    """
    with run.directory.lock():
        if run.record("cache") is None:
            run.require("cache", needed_by="--repair")
        run.refuse_other_identities(["cache"])
        try:
            problems = discard_damaged(run.location("cache"))
        except (CacheCorrupt, FileNotFoundError) as error:
            kept = f"damaged/cache-{time.strftime('%Y%m%d-%H%M%S')}"
            reporter.say(f"damaged: {error}; the old one goes to {run.directory.location(kept)}")
            run.directory.move(run.stages["cache"].output, kept)
            run.reopen("cache")
            return
        for problem in problems:
            reporter.say(f"damaged: {problem}")
        if problems:
            run.reopen("cache")


def count_components(spec: TargetSpec, hidden_sizes: float) -> int:
    """Components that a projected codec keeps; at most as many as there are captured channels."""
    return min(max(1, round(hidden_sizes * spec.hidden_size)), spec.hidden_size * len(spec.target_layer_ids))


def build(
    settings: Settings,
    spec: TargetSpec,
    root: str,
    rows: list[Conversation],
    plan: CachePlan,
    reporter: Reporter,
    *,
    pilot: str | None = None,
) -> dict[str, Any]:
    """Build, audit and close the cache of these rows in the current Ray session; the audit's figures.

    `pilot`: the output of the pilot stage, for a projected codec.
    """
    make_worker = partial(CaptureWorker, settings, spec, root)
    chosen = {row.sample_id for row in evenly_spaced(rows, settings.cache.audit_rows)}
    audited: dict[str, float] = {}
    committed = _create(settings, make_worker, plan, rows, root, pilot)
    todo = []
    for number, (start, stop) in enumerate(plan.shards):
        if number not in committed:
            todo.append(CaptureItem(number=number, rows=tuple(rows[start:stop]), audit=frozenset(chosen)))
    done = plan.tokens - sum(item.tokens for item in todo)
    with reporter.task("capturing states", plan.tokens, "tokens", done) as task:

        def finished(item: CaptureItem, result: dict[str, Any]) -> None:
            audited.update(result["audit"])
            if item.rows:
                task.advance(item.tokens, bytes_per_token=result["bytes_per_token"])

        def run_pool(items: Sequence[CaptureItem], workers: int) -> None:
            on_pool(settings, make_worker, items, workers=workers, on_result=finished, item_name=str)

        if todo:
            run_pool(todo, settings.cache.num_workers)
        left = chosen - set(audited)
        if left:
            run_pool([CaptureItem(number=None, rows=(), audit=frozenset(left))], 1)
    assert plan.teacher is not None
    audit = _judge(audited, plan.teacher.name)
    finish(root, notes={"audit": audit})
    return audit


def plan_cache(
    settings: Settings,
    spec: TargetSpec,
    conversations: Folder,
    codecs: Mapping[str, CodecSpec],
    inputs: Mapping[str, str],
    choose: Callable[[list[Conversation]], list[Conversation]] | None = None,
) -> tuple[list[Conversation], CachePlan]:
    """The rows to capture, in the conversations' order, and the plan that fixes the cache.

    `choose` takes some of the rows that could be captured.
    """
    rows: list[Conversation] = []
    skipped: dict[str, list[str]] = {"empty": [], "unsupervised after the cut": []}
    limit, longest = settings.cache.max_length, 0
    shortened = []
    for row in read_conversations(conversations):
        length = len(row["prompt_ids"]) + len(row["response_ids"])
        longest = max(longest, length)
        if not supervised_tokens(row):
            skipped["empty"].append(row["id"])
            continue
        conversation = cut_row(row, limit)
        if not conversation.spans:
            skipped["unsupervised after the cut"].append(row["id"])
            continue
        if length > limit:
            shortened.append(row["id"])
        rows.append(conversation)
    if not rows:
        raise UserError(
            f"no conversation has a supervised token within cache.max_length={limit} (the longest "
            f"has {longest} tokens): raise it"
        )
    if choose is not None:
        rows = choose(rows)
        kept = {row.sample_id for row in rows}
        shortened = [sample_id for sample_id in shortened if sample_id in kept]
    plan = CachePlan(
        contract=spec.contract(settings, with_block=False),
        num_layers=len(spec.target_layer_ids),
        hidden_size=spec.hidden_size,
        samples=[(row.sample_id, len(row.input_ids)) for row in rows],
        hidden_states=codecs["features"],
        teacher=codecs["teacher"],
        tokens_per_shard=settings.cache.tokens_per_shard,
        inputs={**inputs, "dtype": settings.target.dtype},
        spans=[row.spans for row in rows],
        skipped={reason: ids for reason, ids in skipped.items() if ids},
        shortened=shortened,
        max_bytes=settings.cache.max_bytes,
    )
    return rows, plan


def cut_row(row: Mapping[str, Any], max_length: int) -> Conversation:
    """What is captured of a row of the conversations: its first tokens, and which of them the target answered."""
    ids, spans = generated_sample(
        row["prompt_ids"], row["response_ids"], max_length, spans=row.get("spans"), row=row["id"]
    )
    extra = {key: row[key] for key in ("domain", "thinking", "finish_reason")}
    return Conversation(sample_id=row["id"], input_ids=ids, spans=spans, extra=extra)


def _create(
    settings: Settings, make_worker: Any, plan: CachePlan, rows: list[Conversation], root: str, pilot: str | None
) -> set[int]:
    """Create the cache, its codecs fitted by a worker if they have statistics; the shards already committed."""
    assert plan.teacher is not None
    fitted = not all(codec_class(spec.name).exact for spec in (plan.hidden_states, plan.teacher))
    if fitted and not Folder(root).exists("manifest.json"):
        tokens = max(MIN_FIT_TOKENS, FIT_TOKENS_A_CHANNEL * plan.num_layers * plan.hidden_size)
        sample = evenly_spaced(rows, max(8, tokens * len(rows) // plan.tokens))
        item = FitItem(rows=tuple(sample), plan=plan, components=pilot, temperature=settings.cache.temperature)
        on_pool(
            settings,
            make_worker,
            [item],
            workers=1,
            on_result=lambda item, result: None,
            item_name=lambda item: "fit of the codecs",
        )
    return create_or_resume(root, plan)


def _judge(audited: dict[str, float], codec: str) -> dict[str, Any]:
    """The audit's figures. Raises UserError when stored and live teacher are too far apart for the codec."""
    if not audited:
        return {"rows": 0}
    mean = sum(audited.values()) / len(audited)
    exact = codec_class(codec).exact
    bound = AUDIT_BOUND_EXACT if exact else AUDIT_BOUND_LOSSY
    worst = max(audited, key=lambda sample_id: audited[sample_id])
    if not mean <= bound:
        raise UserError(
            f"the audit failed: the stored teacher is {mean:.3f} (total variation) from the live target on "
            f"{len(audited)} rows, at most {bound} was expected of cache.teacher_codec={codec} "
            f"(worst row {worst!r}: {audited[worst]:.3f}). The target or its dtype changed during the build, or the "
            "codec is too coarse: choose a finer one"
        )
    return {"rows": len(audited), "mean_total_variation": mean, "worst": {"row": worst, "value": audited[worst]}}
