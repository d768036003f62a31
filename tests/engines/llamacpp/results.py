"""Stored results, which docs/engines.md quotes: one JSON file a test module, one section a test."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from .toolchain import PACKAGE, SHA256, VERSION

RESULTS = Path(__file__).parents[1] / "results"


def record(file: str, section: str, found: dict[str, Any], **provenance: Any) -> None:
    """Replace one section of `results/FILE` and say with what and when it was measured."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / file
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored[section] = {
        **found,
        "provenance": {
            "engine": f"{PACKAGE}=={VERSION} (llama.cpp b{VERSION.split('.')[0]})",
            "engine_sha256": SHA256,
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "measured": time.strftime("%Y-%m-%d", time.gmtime()),
            **provenance,
        },
    }
    path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
