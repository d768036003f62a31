"""Where an output comes from: command, code revision, package versions, hardware, seed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from storage.files.masking import mask

PACKAGES = (
    "dspark",
    "torch",
    "transformers",
    "tokenizers",
    "deepspeed",
    "ray",
    "datasets",
    "pyarrow",
    "zstandard",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "wandb",
)


def collect(seed: int | None = None) -> dict[str, Any]:
    """One JSON object that says what ran, on what, when. Imports none of the packages it names."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [mask(word) for word in sys.argv],
        "working_directory": os.getcwd(),
        "seed": seed,
        "code": code_revision(),
        "packages": package_versions(),
        "hardware": hardware(),
    }


def code_revision() -> dict[str, Any]:
    """Commit of the checkout that this code runs from, and whether it had changes; nulls outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "modified": None if changes is None else bool(changes)}


def package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def hardware() -> dict[str, Any]:
    """Machine, cores, memory in bytes, free disk in bytes, and the GPUs that nvidia-smi lists."""
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "free_disk_bytes": shutil.disk_usage(".").free,
        "gpus": gpus(),
    }


def gpus() -> list[str]:
    """Names and memory of the GPUs, as nvidia-smi gives them."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git(root: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None or not (root / ".git").exists():
        return None
    answer = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None
