"""Publish a drafter: checkpoint in its own layout (and others beside), temperatures, contract, model card, manifest.

1. Write everything into a folder beside the final one.
2. Check it (pipelines.publishing.checks); a check that fails leaves nothing behind.
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

import numpy as np
import torch

from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.manifest import new_folder, read_manifest
from dspark.models.checkpoint import CONFIG, save_drafter
from pipelines.errors import UserError
from pipelines.publishing import checks
from pipelines.publishing.card import model_card
from pipelines.publishing.layouts import layouts
from pipelines.reporting.page import render_page


class PublishError(UserError):
    """What is to be published does not fit together."""


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What is published.

    drafter: the trained module. target: `dspark.decoding.target.Target` with its embedding and head. contract: how
    states and blocks are to be read, with the drafter's block fields. calibration: {"temperatures": [G], …} or None.
    report: report.json, for the card and beside the checkpoint. dtype: "float32", "bfloat16" or None (as trained).
    license: of the weights; None leaves it out of the card. engines: named when a captured layer is -1 or the last one.
    layouts: others that it is published in, each in a folder of its name.
    """

    name: str
    drafter: Any
    target: Any
    contract: Contract
    calibration: Mapping[str, Any] | None = None
    report: Mapping[str, Any] | None = None
    dtype: str | None = None
    license: str | None = None
    engines: Sequence[str] = ()
    layouts: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def publish(publication: Publication, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Publish into a local folder, replacing what is there; returns the manifest.

    Raises CheckFailed, PublishError, SettingError (no such layout) or CheckpointError; the old folder then stays.
    """
    final, drafter = Path(folder), publication.drafter
    notes = drafter.engine_notes(drafter.config, speculators="speculators" in publication.layouts)
    with new_folder(final, engines=notes) as staging:
        _write(publication, staging, notes)
    return read_manifest(final) or {}


def _write(p: Publication, staging: Path, notes: Sequence[str]) -> None:
    """The files but the manifest."""
    drafter = p.drafter
    if p.dtype is not None and str(drafter.dtype).removeprefix("torch.") != p.dtype:
        drafter = copy.deepcopy(drafter).to(getattr(torch, p.dtype))
    embedding, head = p.target.embed_tokens.weight, p.target.lm_head.weight
    save_drafter(drafter, staging, p.target.text_config)
    config = json.loads((staging / CONFIG).read_text())
    if not torch.equal(embedding, head):
        # llama.cpp would take a stored embedding for the head where the target does not tie the two.
        config["has_embed_tokens"] = False
        _write_json(staging / CONFIG, config)
    temperatures = check_temperatures(p.calibration, drafter.config)
    found = {
        "1 every key written": checks.keys_written(config),
        "2 ids are real": checks.ids_are_real(config, embedding, engines=p.engines),
        "3 shared weights equal": checks.shared_weights_equal(staging, embedding, head),
        "4 reads back": checks.reads_back(staging, drafter),
        "5 engines": list(notes),
    }
    for name in p.layouts:
        written = layouts[name].write(drafter, staging / name, p.contract, [type(p.target.model).__name__])
        found[f"4 reads back, {name}"] = written
    _check_contract(p.contract, drafter.config)
    p.contract.write(staging)
    _write_json(staging / "publish_checks.json", found)
    if temperatures is not None:
        assert p.calibration is not None
        _write_json(staging / "temperatures.json", dict(p.calibration) | {"temperatures": temperatures})
        _write_json(staging / "sglang_temperatures.json", sglang_table(p.calibration, temperatures))
    if p.report is not None:
        (staging / "report.html").write_text(render_page(p.report))
        (staging / "report.json").write_text(json.dumps(p.report, indent=1, ensure_ascii=False))
    if p.provenance:
        _write_json(staging / "provenance.json", p.provenance)
    card = model_card(
        p.name,
        drafter.config,
        p.contract,
        temperatures,
        p.report,
        notes,
        license=p.license,
        calibration=p.calibration,
        layouts=p.layouts,
    )
    (staging / "README.md").write_text(card)


def check_temperatures(calibration: Mapping[str, Any] | None, config: DrafterConfig) -> list[float] | None:
    """The table, one positive number a slot; PublishError says what is wrong with it. None when not calibrated."""
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
