"""Publish the drafter: the native checkpoint with everything that a server or a reader needs beside it.

1. Open the target and the trained drafter.
2. Check what was written (keys, ids, shared weights, every tensor read back); `published/` is whole or not there.
3. Upload it, when `publish.repository` names one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.calibration import without_harm
from dspark.contract import Contract
from dspark.manifest import require_place
from dspark.models.checkpoint import load_drafter
from pipelines.drafter_folder import remade
from pipelines.plugins import plugin_identity
from pipelines.publishing.checks import layers_are_servable
from pipelines.publishing.hub import upload
from pipelines.publishing.layouts import layouts, require_forms
from pipelines.publishing.publication import Publication, publish
from pipelines.settings import Settings
from pipelines.stages.calibrate import read_calibration
from pipelines.target_spec import resolve_target
from pipelines.training.task import drafter_config
from pipelines.workers import open_target
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """Name, layouts and licence; where it is uploaded changes nothing of it."""
    section = settings.publish
    used = plugin_identity(settings.plugins, [layouts[name] for name in section.layouts])
    return {"publish": section.model_dump(mode="json", exclude={"repository", "private"}), **used}


def check(settings: Settings) -> None:
    """Raises before anything starts for what could not be published: its layers, its layouts, its place."""
    config = drafter_config(settings, resolve_target(settings))
    layers_are_servable(config.target_layer_ids, config.num_target_layers, settings.publish.engines)
    require_forms(settings.publish.layouts, config)
    if "://" not in settings.run.directory:
        require_place(Path(settings.run.directory).expanduser() / "published")


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `published/`."""
    spec = resolve_target(settings)
    target = open_target(settings, spec)
    final = Path(run.location("train"), "final")
    drafter = load_drafter(final, device=target.device, dtype=target.dtype, needs_manifest=True, cure=remade(final))
    summary = run.summary()
    name = settings.publish.name or f"{settings.drafter.algorithm}-{spec.name.split('/')[-1].split(':')[-1]}"
    calibration = read_calibration(run)
    report = json.loads(Folder(run.location("report")).read("report.json"))
    folder = run.directory.path("published")
    manifest = publish(
        Publication(
            name=name,
            drafter=drafter,
            target=target,
            contract=Contract.from_dict(spec.contract(settings, with_block=True)),
            calibration=None if calibration is None else without_harm(calibration, judged_errors(report)),
            report=report,
            license=settings.publish.license,
            layouts=settings.publish.layouts,
            engines=settings.publish.engines,
            dtype=settings.publish.dtype,
            provenance={"invocations": summary.get("invocations", []), "settings": settings.to_dict()},
        ),
        folder,
    )
    if settings.publish.repository is not None:
        upload(folder, settings.publish.repository, private=settings.publish.private, say=reporter.say)
    return {"folder": str(folder), "name": name, "files": sorted(manifest["files"])}


def judged_errors(report: Mapping[str, Any]) -> dict[float, dict[str, float | None]]:
    """The report's ECE by decoding temperature and calibration method, on the evaluation prompts."""
    return {
        row["temperature"]: {method["method"]: method["ece"] for method in row["methods"]}
        for row in report["confidence"]
    }
