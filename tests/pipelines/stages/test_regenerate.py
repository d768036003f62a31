"""What is left out of the training text is said on the screen."""

from pipelines.data.conversations import PromptSet
from pipelines.stages.regenerate import left_out


def test_everything_left_out_has_a_line_with_its_reason() -> None:
    splits = {"train": PromptSet(prompts=(), skipped={"no question": 1}), "evaluation": PromptSet(prompts=())}
    result = {"rows": 2, "dropped": 10, "finish_reasons": {"context": 9, "length": 3}}
    assert left_out(result, splits, 14) == [
        "train: 1 prompts left out (no question)",
        "9 of 12 prompts do not fit the target's context with an answer",
        "10 of 12 answers dropped, shorter than data.min_supervised_tokens=14; their ids are in manifest.json",
    ]
    assert left_out({"rows": 2, "dropped": 0, "finish_reasons": {"stop": 2}}, {}, 14) == []
