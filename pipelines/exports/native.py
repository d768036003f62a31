"""Publish a drafter: checkpoint in its own layout (and another beside), temperatures, contract, model card, manifest.

1. Write everything into a folder beside the final one.
2. Pass the gates (pipelines.exports.gates); one that fails leaves nothing behind.
3. Write the manifest, with the hash of every file.
4. Put the folder in its place. Readers believe a folder with a manifest; it is complete or it is not there.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config import DrafterConfig
from pipelines.exports import gates
from pipelines.exports.card import model_card
from pipelines.run_directory import PUBLISHING
from storage.files.filesystems import Folder, sync_folder

MANIFEST = "manifest.json"
SPECULATORS = "speculators"
FORMAT = "dspark-native/1"


class PublishError(ValueError):
    """What is to be published does not fit together."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is published.

    drafter: the trained module. target: a `Target` with its embedding and head. contract: how states and
    blocks are to be read, with the drafter's block fields. probe_ids: a real text of the target, for gate 4.
    calibration: {"temperatures": [G], …} or None. report: report.json, for the card and beside the checkpoint.
    dtype: "float32", "bfloat16" or None (as trained). license: of the weights; None leaves it out of the card.
    engines: named when a captured layer is -1 or the last one. speculators: that layout too, in a folder of this name.
    """

    name: str
    drafter: Any
    target: Any
    contract: Any
    probe_ids: Sequence[int]
    calibration: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    dtype: str | None = None
    license: str | None = None
    engines: Sequence[str] = ()
    speculators: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)


def publish_native(publication: Publication, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Publish into `folder` (local, `s3://`, `gs://`), replacing what is there; returns the manifest.

    Raises gates.GateFailed or PublishError; the old folder then stays as it was.
    """
    destination = Folder(folder)
    parent = destination.local_path().parent if destination.is_local else None
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
        _finish_interrupted(destination.local_path())
    with tempfile.TemporaryDirectory(prefix=PUBLISHING, dir=parent) as temporary:
        staging = Path(temporary) / "published"
        staging.mkdir()
        results = _write(publication, staging)
        manifest = write_manifest(staging, results)
        if destination.is_local:
            _put_in_place(staging, destination.local_path())
        else:
            _copy_out(staging, destination, manifest)
    return manifest


def _write(publication: Publication, staging: Path) -> dict[str, Any]:
    """The files but the manifest, and what the gates measured."""
    import torch

    from dspark.checkpoint import save_drafter
    from pipelines.exports.speculators import write_speculators

    p = publication
    drafter = p.drafter
    if p.dtype is not None and str(drafter.dtype).removeprefix("torch.") != p.dtype:
        drafter = copy.deepcopy(drafter).to(getattr(torch, p.dtype))
    embedding, head = p.target.embed_tokens.weight, p.target.lm_head.weight
    save_drafter(drafter, staging, p.target.text_config)
    config_file = staging / "config.json"
    config = json.loads(config_file.read_text())
    if not torch.equal(embedding, head):
        # llama.cpp would take a stored embedding for the head where the target does not tie the two.
        config["has_embed_tokens"] = False
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    temperatures = check_temperatures(p.calibration, drafter.config)
    features = p.target.capture(torch.tensor([list(p.probe_ids)])).features[0]
    results = {
        "1 every key written": gates.keys_written(config),
        "2 ids are real": gates.ids_are_real(config, embedding, engines=p.engines),
        "3 shared weights equal": gates.shared_weights_equal(staging, embedding, head),
        "4 drafts alike": gates.drafts_alike(staging, drafter, p.probe_ids, features),
        "5 engines": gates.engine_notes(drafter.config, speculators=p.speculators),
    }
    if p.speculators:
        other = staging / SPECULATORS
        write_speculators(
            drafter, other, target_name=p.contract.target_name, architectures=[type(p.target.model).__name__]
        )
        results["4 drafts alike, speculators layout"] = gates.drafts_alike(other, drafter, p.probe_ids, features)
    _check_contract(p.contract, drafter.config)
    _write_json(staging / "contract.json", p.contract.to_dict())
    _write_json(staging / "gates.json", results)
    if temperatures is not None:
        assert p.calibration is not None
        _write_json(staging / "temperatures.json", dict(p.calibration) | {"temperatures": temperatures})
        _write_json(staging / "sglang_temperatures.json", sglang_table(p.calibration, temperatures))
    if p.report is not None:
        from pipelines.reporting.page import render_page

        (staging / "report.html").write_text(render_page(p.report))
        (staging / "report.json").write_text(json.dumps(p.report, indent=1, ensure_ascii=False))
    if p.provenance:
        (staging / "provenance.json").write_text(json.dumps(p.provenance, indent=2, default=str) + "\n")
    card = model_card(
        p.name,
        drafter.config,
        p.contract.to_dict(),
        temperatures,
        p.report,
        results,
        license=p.license,
        shifted=(p.calibration or {}).get("method") == "affine",
    )
    (staging / "README.md").write_text(card)
    return results


def check_temperatures(calibration: Mapping[str, Any] | None, config: DrafterConfig) -> list[float] | None:
    """The table, one positive number a slot; PublishError says what is wrong with it. None when not calibrated."""
    import numpy as np

    if calibration is None or not config.enable_confidence_head:
        return None
    table = [float(value) for value in calibration["temperatures"]]
    slots = config.block_size
    if len(table) != slots:
        raise PublishError(f"{len(table)} temperatures for a block of {slots} slots; calibrate this drafter again")
    with np.errstate(over="ignore"):
        narrow = np.asarray(table, dtype=np.float32)
    if not (np.isfinite(narrow).all() and (narrow > 0).all()):
        raise PublishError(f"temperatures must be positive and finite in float32, got {table}; calibrate again")
    return table


def sglang_table(calibration: Mapping[str, Any], temperatures: Sequence[float]) -> dict[str, Any]:
    """The file for SGLang's `--speculative-dspark-confidence-sts-path`: its keys and no others."""

    errors = calibration.get("ece_on_fitted_rounds") or {}

    def by_slot(moment: str) -> list[float]:
        values = errors.get(moment) or []
        return [float(value) for value in values] if len(values) == len(temperatures) and None not in values else []

    return {
        "temperatures": list(temperatures),
        "dataset": str(calibration.get("fitted_on", "")),
        "num_samples": int(calibration.get("rounds") or 0),
        "ece_before": by_slot("before"),
        "ece_after": by_slot("after"),
    }


def _check_contract(contract: Any, config: DrafterConfig) -> None:
    stated = {"target_layer_ids": config.target_layer_ids, "block_size": config.block_size}
    if config.algorithm != "eagle3":
        stated |= {"mask_token_id": config.mask_token_id, "block_layout": config.block_layout}
    for name, value in stated.items():
        if getattr(contract, name) != value:
            raise PublishError(
                f"the contract says {name} {getattr(contract, name)!r}, the checkpoint {value!r}: the drafter was "
                "trained under another contract than the one that is published with it"
            )


def write_manifest(folder: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Hash and size of every file, made durable; the manifest itself is written last."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            files[path.relative_to(folder).as_posix()] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    manifest = {"format": FORMAT, "files": files, "engines": results["5 engines"]}
    _write_json(folder / MANIFEST, manifest)
    with open(folder / MANIFEST, "rb") as stream:
        os.fsync(stream.fileno())
    sync_folder(folder)
    return manifest


def verify_published(folder: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a published folder; empty when every file is there with its hash."""
    place = Folder(folder)
    if not place.exists(MANIFEST):
        return [f"{place.describe(MANIFEST)} is missing: publishing was not finished (`dspark publish` does it again)"]
    problems = []
    for name, facts in json.loads(place.read(MANIFEST))["files"].items():
        if not place.exists(name):
            problems.append(f"{name} is missing")
        elif hashlib.sha256(place.read(name)).hexdigest() != facts["sha256"]:
            problems.append(f"{name} has been changed since it was published")
    return problems


def _put_in_place(staging: Path, final: Path) -> None:
    """Two renames; should the process end between them, the next publication puts the old folder back."""
    previous = final.with_name(final.name + ".previous")
    if final.exists():
        os.rename(final, previous)
    os.rename(staging, final)
    sync_folder(final.parent)
    if previous.exists():
        shutil.rmtree(previous)


def _finish_interrupted(final: Path) -> None:
    previous = final.with_name(final.name + ".previous")
    if previous.exists():
        if final.exists():
            shutil.rmtree(previous)
        else:
            os.rename(previous, final)


def _copy_out(staging: Path, destination: Folder, manifest: Mapping[str, Any]) -> None:
    """To an object store: the old manifest goes first and the new one comes last."""
    destination.remove(MANIFEST)
    for name in manifest["files"]:
        with destination.writer(name) as out, open(staging / name, "rb") as source:
            shutil.copyfileobj(source, out, 1 << 20)
    destination.write(MANIFEST, (staging / MANIFEST).read_bytes())


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n")
