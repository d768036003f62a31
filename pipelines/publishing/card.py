"""The model card: what the drafter is, what was measured, who can serve it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.registry import algorithms
from pipelines.publishing.layouts import layouts as known_layouts
from pipelines.reporting.markdown import code, escape, length_table

# What an engine asks for before it is started.
CONVERSION = {"llama.cpp": "convert with `convert_hf_to_gguf.py --target-model-dir TARGET`, serve with "}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def model_card(
    name: str,
    config: DrafterConfig,
    contract: Contract,
    temperatures: Sequence[float] | None,
    report: Mapping[str, Any] | None,
    notes: Sequence[str],
    *,
    layouts: Sequence[str] = (),
    calibration: Mapping[str, Any] | None = None,
    license: str | None,
) -> str:
    """README.md with YAML front matter. Figures come from the report; without one the card says so.

    notes: what engines can do with it. layouts: those that it is published in beside its own. calibration: the record
    that the temperatures come from; its method may shift logits too, which no engine does.
    """
    front = _front_matter(contract, license, report)
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {escape(name)}",
        "",
    ]
    drafter = algorithms[config.algorithm]
    kind = f"{'An' if drafter.title[0] in 'AEIO' else 'A'} {drafter.title}"
    commands = drafter.commands(config, speculators="speculators" in layouts, temperatures=bool(temperatures))
    ids = ", ".join(map(str, config.target_layer_ids))
    last = tuple(config.target_layer_ids) == (config.num_target_layers,)
    read = "last hidden state" if last else f"outputs of the target's decoder layers {ids} (from 0)"
    lines += [
        f"{kind} drafter for speculative decoding with {code(contract.target_name)}. It drafts "
        f"{config.block_size} {'token' if config.block_size == 1 else 'tokens'} a round, which the target verifies in "
        "one pass; the text is the target's own.",
        "",
        "It works with this target only: "
        + (f"revision {code(contract.target_revision)}, " if contract.target_revision else "")
        + f"weights {code(f'sha256:{contract.weights_sha256[:16]}…')}, thinking mode {contract.thinking}.",
        "",
        "## Measured",
        "",
        *_measured(report),
        "",
        "## Serving",
        "",
        *[f"- {note}" for note in notes],
        f"- {drafter.describe(config)}; it reads the {read}.",
        *[f"- {engine}: {CONVERSION.get(engine, '')}`{arguments}`" for engine, arguments in commands.items()],
    ]
    if temperatures:
        values = ", ".join(f"{value:.3f}" for value in temperatures)
        lines += [
            "",
            "## Confidence",
            "",
            f"The confidence head's logit of each slot is divided by its temperature: {values} "
            "(`temperatures.json`; `sglang_temperatures.json` is the same table as SGLang reads it).",
        ]
        lines += _taken_back(calibration or {})
        if (calibration or {}).get("method") == "affine":
            lines += [
                "",
                "The report's calibrated figures use a shift a slot too (`affine` in `temperatures.json`), which "
                "no engine reads: what these temperatures alone reach stands beside them, among other calibrations.",
            ]
    lines += [
        "",
        "## Files",
        "",
        "- `config.json`, `model.safetensors`: the checkpoint; embedding and head are the target's, bit for bit.",
        "- `contract.json`: what the states and blocks mean, with the hashes of target, tokenizer and chat template.",
        "- `publish_checks.json`: what was checked before publication. `manifest.json`: the hash of every file.",
    ]
    lines += [f"- `{name}/`: the same drafter in {known_layouts[name].description}." for name in layouts]
    if report is not None:
        lines += ["- `report.html`, `report.json`: how it was measured, slot by slot."]
    return "\n".join(lines) + "\n"


def _front_matter(contract: Contract, license: str | None, report: Mapping[str, Any] | None) -> dict[str, Any]:
    front: dict[str, Any] = {}
    if license:
        front["license"] = license
    # A target that lies in a folder, or comes out of a package, has no commit of the hub.
    if re.fullmatch("[0-9a-f]{40}", contract.target_revision or "") and _HUB_ID.fullmatch(contract.target_name):
        front["base_model"] = contract.target_name
    front["pipeline_tag"] = "text-generation"
    front["tags"] = ["speculative-decoding", "draft-model", "dspark"]
    value = _headline(report)
    if value is not None:
        front["accepted_length"] = round(value, 3)
    return front


def _headline(report: Mapping[str, Any] | None) -> float | None:
    for row in (report or {}).get("accepted_length", ()):
        if (row["drafter"], row["temperature"], row["domain"]) == ("dspark", 0.0, "mean"):
            return None if row["value"] is None else float(row["value"])
    return None


def _measured(report: Mapping[str, Any] | None) -> list[str]:
    if report is None or not report["accepted_length"]:
        return ["Not measured."]
    lines = [*map(escape, report["summary"]), "", "Accepted length (tokens a target pass, bonus token included):", ""]
    lines += length_table(report)
    warnings = [flag["text"] for flag in report["flags"] if flag["level"] == "warning"]
    if warnings:
        lines += ["", *[f"- **Warning.** {escape(text)}" for text in warnings]]
    return lines


def _taken_back(calibration: Mapping[str, Any]) -> list[str]:
    """What made the calibration error worse on the evaluation prompts, and so is published as no calibration."""
    lines = []
    for table in calibration.get("tables", [calibration]):
        for method, errors in table.get("taken_back", {}).items():
            lines += [
                "",
                f"The `{method}` table of temperature {table['temperature']:g} is published as no calibration: on the "
                f"evaluation prompts it raised the calibration error from {errors['ece_before']:.2%} to "
                f"{errors['ece_after']:.2%}.",
            ]
    return lines
