from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.exports.reader import NativeReader

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent.parent.name for path in GOLDEN.glob("d*/checkpoint/config.json"))


@pytest.mark.parametrize("name", FOLDERS)
def test_reads_the_reference_checkpoints(name: str) -> None:
    """Reader and reference implementation share nothing but the folder."""
    reader = NativeReader(GOLDEN / name / "checkpoint")
    with np.load(GOLDEN / name / "draft_rounds.npz") as stored:
        case = {key: torch.from_numpy(stored[key]) for key in stored.files}
    features, sequence = (
        case["context_features"].reshape(-1, case["context_features"].shape[-1]),
        case["sequence"].flatten(),
    )
    rounds = sorted({key.split("/")[0] for key in case if key.startswith("round")})
    assert len(rounds) == 3
    for one in rounds:
        anchor = int(case[f"{one}/anchor_position"])
        draft = reader.draft(int(sequence[anchor]), features[:anchor])
        assert draft.tokens == case[f"{one}/tokens"].flatten().tolist()
        torch.testing.assert_close(draft.logits, case[f"{one}/logits"][0], atol=1e-4, rtol=0)
        if f"{one}/confidence_logits" in case:
            assert draft.confidence is not None
            torch.testing.assert_close(draft.confidence, case[f"{one}/confidence_logits"][0], atol=1e-4, rtol=0)


def test_refuses_another_architecture() -> None:
    with pytest.raises(ValueError, match="Qwen3Eagle3Model"):
        NativeReader(GOLDEN / "eagle3_qwen3" / "checkpoint")
