"""The sweep of kills in short: the long form is `make training-kill-sweep`, its result in docs/evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_kills import sweep


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_killed_three_times_ends_as_an_undisturbed_one(tmp_path: Path):
    result = sweep(tmp_path, kills=3, seed=1, steps=14)
    assert result["passed"], json.dumps(result, indent=1)
