from pathlib import Path
from typing import Any

import torch
from oracle import drafts_alike

from dspark.contract import Contract
from dspark.decoding.target import Target
from dspark.models.checkpoint import load_drafter
from pipelines.publishing.publication import Publication

GOLDEN = Path(__file__).parents[1] / "golden"


def publication(name: str, **changes: Any) -> Publication:
    """One of the conformance drafters with its target, ready to be published."""
    from transformers import AutoModelForCausalLM

    drafter = load_drafter(GOLDEN / name / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name / "target")
    target = Target(model, target_layer_ids=drafter.config.target_layer_ids, name="golden/target")
    contract = Contract(
        target_name="golden/target",
        target_revision="abc0" * 10,
        weights_sha256="1" * 64,
        tokenizer_sha256="2" * 64,
        chat_template_sha256="3" * 64,
        thinking="off",
        target_layer_ids=drafter.config.target_layer_ids,
        block_layout=None if drafter.config.algorithm == "eagle3" else drafter.config.block_layout,
        block_size=drafter.config.block_size,
        mask_token_id=drafter.config.mask_token_id,
    )
    values: dict[str, Any] = {
        "name": f"A drafter ({name})",
        "drafter": drafter,
        "target": target,
        "contract": contract,
        "calibration": {
            "temperatures": [1.1 + 0.1 * slot for slot in range(drafter.config.block_size)],
            "fitted_on": "calibration",
            "rounds": 321,
        },
        "license": "mit",
    }
    return Publication(**(values | changes))


def compared(made: Publication, folder: Path) -> dict[str, Any]:
    """The folder as the second implementation drafts with it, against the trained drafter, on a text of the target."""
    text = torch.randint(0, 150, (40,), generator=torch.Generator().manual_seed(0))
    hidden_states = made.target.capture(text[None]).hidden_states[0]
    return drafts_alike(folder, made.drafter, text.tolist(), hidden_states)
