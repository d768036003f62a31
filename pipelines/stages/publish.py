"""Publish the drafter: the native checkpoint with everything that a server or a reader needs beside it.

1. Open the target and the trained drafter.
2. Pass the gates (INTEROP: keys, ids, shared weights, equal drafts, engines); write `published/` whole or not at all.
3. Upload it, when `publish.repository` names one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.drafter_folder import remade
from pipelines.settings import Settings
from pipelines.stages.calibrate import read_calibration
from pipelines.target_facts import examine_target
from pipelines.workers import open_target
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """Name, layouts and licence; where it is uploaded changes nothing of it."""
    return {"publish": settings.publish.model_dump(mode="json", exclude={"repository", "private"})}


def check(settings: Settings) -> None:
    """Raises before anything starts for captured layers that no named engine takes, or a layout without such a form."""
    from dspark.manifest import require_place
    from pipelines.exports.gates import layers_are_servable
    from pipelines.exports.speculators import require_form
    from pipelines.training.task import drafter_config

    config = drafter_config(settings, examine_target(settings))
    layers_are_servable(config.target_layer_ids, config.num_target_layers, settings.publish.engines)
    if settings.publish.speculators:
        require_form(config)
    if "://" not in settings.run.directory:
        require_place(Path(settings.run.directory).expanduser() / "published")


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `published/`."""
    from dspark.calibration import without_harm
    from dspark.contract import Contract
    from dspark.models.checkpoint import load_drafter
    from pipelines.exports.native import Publication, publish_native
    from pipelines.stages.regenerate import read_conversations

    facts = examine_target(settings)
    target = open_target(settings, facts)
    final = Path(run.location("train"), "final")
    drafter = load_drafter(final, device=target.device, dtype=target.dtype, needs_manifest=True, cure=remade(final))
    probe = next(read_conversations(Folder(run.location("regenerate"))))
    summary = run.directory.read_json("run.json") or {}
    name = settings.publish.name or f"{settings.drafter.algorithm}-{facts.name.split('/')[-1].split(':')[-1]}"
    calibration = read_calibration(run)
    report = json.loads(Folder(run.location("report")).read("report.json"))
    manifest = publish_native(
        Publication(
            name=name,
            drafter=drafter,
            target=target,
            contract=Contract.from_dict(facts.contract(settings, with_block=True)),
            probe_ids=(probe["prompt_ids"] + probe["response_ids"])[:512],
            calibration=None if calibration is None else without_harm(calibration, judged_errors(report)),
            report=report,
            license=settings.publish.license,
            speculators=settings.publish.speculators,
            engines=settings.publish.engines,
            dtype=settings.publish.dtype,
            provenance={"invocations": summary.get("invocations", []), "settings": settings.to_dict()},
        ),
        run.location("publish"),
    )
    if settings.publish.repository is not None:
        from pipelines.exports.hub import HubSettings, upload

        upload(
            run.location("publish"),
            HubSettings(repo_id=settings.publish.repository, private=settings.publish.private),
        )
    return {"folder": run.location("publish"), "name": name, "files": sorted(manifest["files"])}


def judged_errors(report: Mapping[str, Any]) -> dict[float, dict[str, float | None]]:
    """The report's ECE by decoding temperature and calibration method, on the evaluation prompts."""
    return {
        row["temperature"]: {method["method"]: method["ece"] for method in row["methods"]}
        for row in report["confidence"]
    }
