"""Publish a drafter: checkpoint in its own layout (and another beside), temperatures, contract, model card, manifest.

1. Write everything into a folder beside the final one.
2. Pass the gates (pipelines.exports.gates); one that fails leaves nothing behind.
3. Put the folder in its place, with the hash of every file in its manifest (dspark.manifest).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.config import DrafterConfig
from dspark.manifest import new_folder, read_manifest
from pipelines.errors import UserError
from pipelines.exports import gates
from pipelines.exports.card import model_card

SPECULATORS = "speculators"


class PublishError(UserError):
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
    """Publish into a local folder, replacing what is there; returns the manifest.

    Raises gates.GateFailed, PublishError or CheckpointError; the old folder then stays as it was.
    """
    final = Path(folder)
    notes = publication.drafter.engine_notes(publication.drafter.config, speculators=publication.speculators)
    with new_folder(final, engines=notes) as staging:
        _write(publication, staging)
    return read_manifest(final) or {}


def _write(publication: Publication, staging: Path) -> None:
    """The files but the manifest."""
    import torch

    from dspark.models.checkpoint import save_drafter
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
        "5 engines": drafter.engine_notes(drafter.config, speculators=p.speculators),
    }
    if p.speculators:
        other = staging / SPECULATORS
        write_speculators(
            drafter, other, target_name=p.contract.target_name, architectures=[type(p.target.model).__name__]
        )
        results["4 drafts alike, speculators layout"] = gates.drafts_alike(other, drafter, p.probe_ids, features)
    _check_contract(p.contract, drafter.config)
    p.contract.write(staging)
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
        calibration=p.calibration,
    )
    (staging / "README.md").write_text(card)


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
    if config.mask_token_id is not None:
        stated |= {"mask_token_id": config.mask_token_id, "block_layout": config.block_layout}
    for name, value in stated.items():
        if getattr(contract, name) != value:
            raise PublishError(
                f"the contract says {name} {getattr(contract, name)!r}, the checkpoint {value!r}: the drafter was "
                "trained under another contract than the one that is published with it"
            )


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True, default=str) + "\n")
