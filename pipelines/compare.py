"""`dspark compare RUN_OR_FOLDER …`: drafters of one target, decoded on the same prompts, temperatures and seeds.

1. Find each drafter, check its files against their hashes, and that it was made for the target of these settings.
2. Decode with plain greedy decoding and with every drafter what is not there yet. Rounds are kept in
   `OUTPUT/decoded/IDENTITY`, where the identity is of the drafter, target, prompts and lengths: one more drafter,
   temperature or seed decodes that alone. It is the evaluation's own decoding, with these drafters as its baselines.
3. Measure what a round costs at batch 1, 16 and 64 (`costs.json` beside the rounds).
4. Write `compare.json`, `compare.md` and `compare.html`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dspark.config import DrafterConfig
from dspark.decoding.proposers import proposer_for
from dspark.decoding.step_timing import measure_rounds
from pipelines.data.conversations import Prompt, evenly_spaced, file_sha256, read_prompts
from pipelines.drafter_folder import published_config
from pipelines.errors import UserError
from pipelines.evaluation import comparison, figures
from pipelines.evaluation.round_log import COMPLETIONS, EVENTS, read_completions, read_events
from pipelines.json_files import parse_json, write_json
from pipelines.progress import flatten
from pipelines.provenance import hardware
from pipelines.refit import published_parts
from pipelines.reporting.comparison import write_comparison
from pipelines.runs.run import Run, open_run
from pipelines.settings import Settings, load_settings
from pipelines.settings.schema import EvaluateSettings
from pipelines.stages.decoding import FULL, PLAIN, DecodePlan, DecodeWorker, decode_all, work_items
from pipelines.stages.decoding import without_sequential_head as without_head
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.workers import on_pool, session
from storage.files.filesystems import Folder
from storage.identity import identity_of, plain

if TYPE_CHECKING:
    from pipelines.progress import Reporter

SCHEMA = "dspark-compare/1"
DRAFTER = "drafter"  # its name in the rounds that are kept: what it is called here may change from call to call
BATCHES = (1, 16, 64)
COSTS = "costs.json"
# What decides a drafter; the rest of a run's settings says where and how it was worked on.
COMPARED = ("drafter", "train", "data", "regenerate", "cache", "pilot", "run.seed")


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A drafter that is compared; `run` is the run directory that its folder lies in, if any."""

    name: str
    folder: Path
    run: Path | None


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(runs and folders, settings): `section.key=value` of a section of the settings is a setting."""
    overrides = [
        word
        for word in words
        if "=" in word and word.split("=")[0].split(".")[0] in Settings.model_fields and "." in word.split("=")[0]
    ]
    return [word for word in words if word not in overrides], overrides


def find_contenders(words: Sequence[str]) -> list[Contender]:
    """The drafter of each RUN, FOLDER or NAME=FOLDER. Raises UserError for one that holds none, or a name twice."""
    found: list[Contender] = []
    for word in words:
        given, equals, place = word.partition("=")
        named = bool(equals) and "/" not in given and not Path(word).expanduser().exists()
        path = Path(place if named else word).expanduser()
        folder, run = _drafter_in(path)
        own = given if named else (run if run is not None else path).resolve().name
        name, number = own, 1
        while not named and any(name == other.name for other in found):
            number += 1
            name = f"{own}-{number}"
        if name == PLAIN or not name or any(name == other.name for other in found):
            raise UserError(f"the name {name!r} is taken; give another one: NAME={path}")
        found.append(Contender(name=name, folder=folder, run=run))
    if len(found) < 2:
        raise UserError("a comparison needs two drafters or more: add run directories or published folders")
    return found


def _drafter_in(path: Path) -> tuple[Path, Path | None]:
    if (path / "run.json").is_file():
        for name in ("published", "checkpoints/final"):
            if (path / name / "config.json").is_file():
                return path / name, path
        raise UserError(f"the run in {path} has no drafter yet; finish it with `dspark run`")
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is no run directory and no drafter's folder: it has neither run.json nor config.json")
    parents = [parent for parent in list(path.resolve().parents)[:2] if (parent / "run.json").is_file()]
    return path, parents[0] if parents else None


def comparison_settings(
    contenders: Sequence[Contender], config: str | None, overrides: Sequence[str], output: str
) -> Settings:
    """Target, prompts and lengths: of `config`, or of the first run. Raises UserError where there is neither."""
    if config is not None:
        settings = load_settings(config, overrides)
    else:
        runs = [one.run for one in contenders if one.run is not None]
        if not runs:
            raise UserError("no run among these says the target and the prompts; add --config CONFIG")
        settings = open_run(str(runs[0]), overrides).settings
    return settings.model_copy(update={"run": settings.run.model_copy(update={"directory": output})})


def compare(
    contenders: Sequence[Contender],
    settings: Settings,
    reporter: Reporter,
    *,
    baseline: str | None = None,
    prompts: int | None = None,
    costs: bool = True,
) -> dict[str, Any]:
    """Decode what is missing, write table and page into `run.directory`, and return what `compare.json` says.

    Raises UserError for a drafter that is damaged or of another target, before anything is decoded.
    """
    baseline = baseline or contenders[0].name
    if baseline not in (names := [one.name for one in contenders]):
        raise UserError(f"--baseline {baseline}: there is no such drafter; these are {', '.join(names)}")
    configs = {one.name: published_config(one.folder, settings, one.name) for one in contenders}
    spec, section, output = resolve_target(settings), settings.evaluate, Path(settings.run.directory)
    chosen = list(read_prompts(settings.data.evaluation, "evaluation", settings.data.on_bad_row).prompts)
    if prompts is not None:
        chosen = evenly_spaced(chosen, min(prompts, len(chosen)))
    shared = _circumstances(settings, spec, chosen)
    run = Run(settings)
    with run.directory.lock():
        decoded: list[tuple[pa.Table, pa.Table]] = []
        measured, skipped = {}, {}
        greedy = section.model_copy(update={"temperatures": (0.0,)})
        for one in [None, *contenders]:
            if one is None and 0.0 not in section.temperatures:
                continue
            plan = _plan(run.settings, spec, one, shared)
            own = greedy if one is None else section
            name = PLAIN if one is None else one.name
            tables, left_out = _decode(plan, own, chosen, name, reporter)
            decoded.append(tables)
            skipped[name] = left_out
            if one is not None and costs:
                measured[name] = _measure(plan, reporter)
        events, completions = (pa.concat_tables(tables) for tables in zip(*decoded, strict=True))
        equality = comparison.exactness(completions.to_pylist(), names)
        gains = comparison.gains(events, baseline)
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "created": time.strftime("%Y-%m-%d %H:%M:%S"),
            "title": f"{len(names)} drafters for {spec.name.split('/')[-1].split(':')[-1]}",
            "target": {"name": spec.name, "revision": spec.revision, **spec.hashes},
            "baseline": baseline,
            "prompts": len(chosen),
            "temperatures": list(section.temperatures),
            "seeds": list(section.seeds),
            "max_new_tokens": section.max_new_tokens,
            "hardware": hardware(),
            "drafters": [_facts(one, configs[one.name]) for one in contenders],
            "errors": comparison.errors(equality),
            "account": list(comparison.account(gains)),
            "accepted_length": figures.accepted_lengths(events),
            "gains": gains,
            "positions": figures.positions(events),
            "costs": _cost_rows(measured),
            "equality": equality,
            "skipped": {name: count for name, count in skipped.items() if count},
            "differences": differences({one.name: _settings_of(one, configs[one.name]) for one in contenders}),
        }
        order = {name: place for place, name in enumerate(names)}
        for table in ("accepted_length", "gains", "positions"):
            report[table].sort(key=lambda row: (row["temperature"], order[row["drafter"]]))
        write_comparison(report, output)
    return report


def _circumstances(settings: Settings, spec: TargetSpec, prompts: Sequence[Prompt]) -> dict[str, Any]:
    section = settings.evaluate
    return {
        "target": spec.hashes,
        "dtype": settings.target.dtype,
        "thinking": settings.target.thinking,
        "render_time": str(settings.data.render_time),
        "prompts": identity_of(plain([prompt.to_row() for prompt in prompts])),
        "max_new_tokens": section.max_new_tokens,
        "batch_size": section.batch_size,
        "seed": settings.run.seed,
    }


def _plan(settings: Settings, spec: TargetSpec, one: Contender | None, shared: Mapping[str, Any]) -> DecodePlan:
    files = (
        {} if one is None else {name: file_sha256(one.folder / name) for name in ("config.json", "model.safetensors")}
    )
    identity = identity_of({**shared, "drafter": files})
    return DecodePlan(
        settings=settings,
        spec=spec,
        folder=str(Path(settings.run.directory).resolve() / "decoded" / identity[:16]),
        circumstances={"identity": identity},
        drafter=None,
        max_new_tokens=settings.evaluate.max_new_tokens,
        batch_size=settings.evaluate.batch_size,
        baselines={} if one is None else {DRAFTER: str(one.folder.resolve())},
        named_by="",
    )


def _decode(
    plan: DecodePlan, section: EvaluateSettings, prompts: Sequence[Prompt], name: str, reporter: Reporter
) -> tuple[tuple[pa.Table, pa.Table], int]:
    """(rounds, completions) under the name that the drafter has here, and how many prompts were left out."""
    variant = DRAFTER if plan.baselines else PLAIN
    items = work_items(section, prompts, "evaluation", lambda temperature: [(variant, FULL)])
    decode_all(
        plan,
        DecodeWorker,
        items,
        workers=section.num_workers,
        what=f"decoding with {name}",
        unit="prompts",
        reporter=reporter,
    )
    folder = Folder(plan.folder)
    wanted = {(item.temperature, item.seed) for item in items}
    tables = []
    for read, file in ((read_events, EVENTS), (read_completions, COMPLETIONS)):
        table = read(folder.full(file))
        pairs = zip(table["temperature"].to_pylist(), table["seed"].to_pylist(), strict=True)
        table = table.filter(pa.array([pair in wanted for pair in pairs], type=pa.bool_()))
        place = table.schema.get_field_index("drafter")
        names = pa.array([name] * len(table), type=pa.string())
        tables.append(table.set_column(place, table.schema.field(place), names))
    left_out = {prompt for item in items for prompt in json.loads(folder.read(item.file))["skipped"]}
    return (tables[0], tables[1]), len(left_out)


class RoundCostWorker(DecodeWorker):
    """Measures a round's parts, the sequential head's share as the difference to the same drafter without it."""

    def run(self, batches: Sequence[int]) -> dict[str, Any]:  # type: ignore[override]
        target, drafter = self.drafters[DRAFTER]
        proposers = {"draft": proposer_for(drafter, target)}
        if getattr(drafter, "markov_head", None) is not None:
            proposers["without_head"] = proposer_for(without_head(drafter), target)
        cost = self.plan.settings.evaluate.cost
        found = measure_rounds(target, proposers, batches, context=cost.context, repeats=cost.repeats)
        return {name: {str(count): seconds for count, seconds in row.items()} for name, row in found.items()}


def _measure(plan: DecodePlan, reporter: Reporter) -> dict[str, Any]:
    folder = Folder(plan.folder)
    if not folder.exists(COSTS):
        found: list[dict[str, Any]] = []
        with session(plan.settings, plan.folder), reporter.task("measuring what a round costs", 1) as task:

            def finished(batches: Sequence[int], costs: dict[str, Any]) -> None:
                found.append(costs)
                task.advance(1)

            on_pool(
                plan.settings,
                partial(RoundCostWorker, plan),
                [BATCHES],
                workers=1,
                on_result=finished,
                item_name=lambda batches: f"rounds of {batches} requests",
            )
        write_json(folder, COSTS, found[0])
    return dict(parse_json(folder.read(COSTS), folder.describe(COSTS)))


def _cost_rows(measured: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds of a round; `head_share` is what the sequential and confidence heads add to the rest of it."""
    rows = []
    for name, found in measured.items():
        for batch in map(str, BATCHES):
            draft, verify = found["draft"][batch], found["verify"][batch]
            without = found.get("without_head", {}).get(batch)
            head = None if without is None else draft - without
            rows.append(
                {
                    "drafter": name,
                    "batch": int(batch),
                    "draft_ms": 1000 * draft,
                    "verify_ms": 1000 * verify,
                    "head_ms": None if head is None else 1000 * head,
                    "head_share": None if head is None else head / (draft - head + verify),
                }
            )
    return rows


def _facts(one: Contender, config: DrafterConfig) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(one.folder / "model.safetensors", framework="numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - it is no mapping
    return {
        "name": one.name,
        "folder": str(one.folder),
        "weights_sha256": file_sha256(one.folder / "model.safetensors"),
        "parameters": sum(math.prod(shape) for shape in shapes),
        **{part: getattr(config, part) for part in ("algorithm", "block_size", "num_draft_layers")},
    }


def _settings_of(one: Contender, config: DrafterConfig) -> dict[str, Any]:
    """By dotted name: the settings of its run, or what its configuration tells of them."""
    if one.run is None:
        return dict(plain(published_parts(config)))
    stored = parse_json((one.run / "run.json").read_bytes(), str(one.run / "run.json"))["settings"]
    keys = flatten(stored, ".")
    return {key: value for key, value in keys if any((key + ".").startswith(part + ".") for part in COMPARED)}


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Settings that are not the same for all, by dotted name; one that a drafter's source does not tell is left out."""
    found = []
    for key in sorted({key for own in settings.values() for key in own}):
        values = {name: own[key] for name, own in settings.items() if key in own}
        if len({json.dumps(value, sort_keys=True, default=str) for value in values.values()}) > 1:
            found.append({"setting": key, "values": values})
    return found
