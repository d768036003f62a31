import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import open_folder

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent.parent.name for path in GOLDEN.glob("*/checkpoint/config.json"))


@pytest.mark.parametrize("name", FOLDERS)
def test_reads_the_reference_checkpoints(name: str) -> None:
    """Reader and reference implementation share nothing but the folder."""
    reader = open_folder(GOLDEN / name / "checkpoint")
    with np.load(GOLDEN / name / "draft_rounds.npz") as stored:
        case = {key: torch.from_numpy(stored[key]) for key in stored.files}
    hidden_states, sequence = (
        case["context_features"].reshape(-1, case["context_features"].shape[-1]),
        case["sequence"].flatten(),
    )
    rounds = sorted({key.split("/")[0] for key in case if key.startswith("round")})
    assert len(rounds) == (2 if name.startswith("eagle3") else 3)
    for one in rounds:
        anchor = int(case[f"{one}/anchor_position"])
        draft = reader.draft(sequence[: anchor + 1].tolist(), hidden_states[:anchor])
        assert draft.tokens == case[f"{one}/tokens"].flatten().tolist()
        torch.testing.assert_close(draft.logits, case[f"{one}/logits"][0], atol=1e-4, rtol=0)
        if f"{one}/confidence_logits" in case:
            assert draft.confidence is not None
            torch.testing.assert_close(draft.confidence, case[f"{one}/confidence_logits"][0], atol=1e-4, rtol=0)


def test_refuses_another_architecture(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "eagle3_qwen3" / "checkpoint", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "architectures": ["Other"]}))
    with pytest.raises(ValueError, match=r"Other.*Qwen3Eagle3Model"):
        open_folder(tmp_path / "other")
