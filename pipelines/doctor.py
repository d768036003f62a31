"""What this machine has, what is missing, and what cures it."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement

from pipelines import provenance
from pipelines.progress import byte_size

QUICKSTART_MEMORY = 8e9  # bytes
QUICKSTART_DISK = 5e9


def examine() -> dict[str, Any]:
    """Hardware, packages, tools and services, and `problems`: a sentence each, with its cure."""
    hardware = provenance.hardware()
    packages = provenance.package_versions()
    tools = {name: shutil.which(name) for name in ("git", "cmake", "ninja", "nvidia-smi")}
    wandb = "a key is configured" if wandb_key_is_configured() else "no key: tracking stays offline"
    return {
        "hardware": hardware,
        "packages": packages,
        "tools": tools,
        "wandb": wandb,
        "problems": _problems(hardware),
    }


def wandb_key_is_configured() -> bool:
    """Whether `WANDB_API_KEY` is set; a key stored elsewhere is used with `tracking.wandb=online`."""
    return bool(os.environ.get("WANDB_API_KEY"))


def _problems(hardware: dict[str, Any]) -> list[str]:
    problems = []
    if hardware["memory_bytes"] < QUICKSTART_MEMORY:
        problems.append(f"{byte_size(hardware['memory_bytes'])} of memory; the quickstart is made for 8 GB")
    if hardware["free_disk_bytes"] < QUICKSTART_DISK:
        problems.append(f"{byte_size(hardware['free_disk_bytes'])} free on this disk; the quickstart may need 5 GB")
    for needed in map(Requirement, requires("dspark") or []):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        cure = f"run `pip install '{needed.name}{needed.specifier}'`, or in a checkout `make environment`"
        try:
            found = version(needed.name)
        except PackageNotFoundError:
            problems.append(f"{needed.name} is not installed; {cure}")
            continue
        if not needed.specifier.contains(found, prereleases=True):
            problems.append(f"{needed.name} is {found}, and {needed.specifier} is needed; {cure}")
    return problems


def findings_text(findings: dict[str, Any]) -> str:
    """For a person."""
    hardware = findings["hardware"]
    lines = [
        f"machine    {hardware['processor']}, {hardware['cores']} cores, {byte_size(hardware['memory_bytes'])} memory, "
        f"{byte_size(hardware['free_disk_bytes'])} free disk",
        f"gpus       {', '.join(hardware['gpus']) or 'none: everything runs on the CPU'}",
        "packages   " + ", ".join(f"{name} {found}" for name, found in findings["packages"].items() if found),
        "tools      " + ", ".join(f"{name}: {where or 'not found'}" for name, where in findings["tools"].items()),
        f"wandb      {findings['wandb']}",
    ]
    lines += [f"problem    {problem}" for problem in findings["problems"]] or ["no problems found"]
    return "\n".join(lines)
