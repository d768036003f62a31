"""Where a program of this folder keeps what it found."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines.provenance import collect


def keep(result: dict[str, Any], output: Path, seed: int) -> None:
    """Write the result as JSON, with the time, the code and the machine that it came from."""
    origin = collect(seed)
    kept = {"created": datetime.now(UTC).isoformat(timespec="seconds"), **result}
    kept["provenance"] = {key: origin[key] for key in ("code", "hardware") if key in origin}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(kept, indent=1) + "\n")
