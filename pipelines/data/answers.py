"""The answers of a conversation as the tokens that the target writes, and the rows that teach them.

An answer is known by the ids that the target was given and those that it wrote. Where the next prompt goes on from
both, the two answers share a row. Where the template renders an answer otherwise once it is history (it drops the
thought, ends with another token, or the text has other tokens), the next answer begins a row of its own, with its
prompt as the target saw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.data.chat import GENERATION, TemplateRefuses, render_turn
from pipelines.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipelines.data.conversations import Prompt
    from pipelines.data.messages import Message
    from pipelines.settings.schema import Settings

Span = tuple[int, int]
GIVEN = "given"  # the finish reason of an answer that the row had already


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was given and what was written, as ids; `said` messages of the conversation end with the answer."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str | None
    said: int
    shortened: bool = False

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.response_ids]

    @property
    def span(self) -> Span:
        return len(self.prompt_ids), len(self.prompt_ids) + len(self.response_ids)


def join_answers(answers: Sequence[Answer]) -> list[list[Answer]]:
    """The answers of each row: of those in a row, every prompt begins with the ids of the one before and its answer."""
    rows: list[list[Answer]] = []
    for answer in answers:
        if rows and answer.prompt_ids[: rows[-1][-1].span[1]] == rows[-1][-1].ids:
            rows[-1].append(answer)
        else:
            rows.append([answer])
    return rows


def given_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    said: Sequence[Message],
    settings: Settings,
    stop_token_ids: Sequence[int],
) -> Answer:
    """The last of these messages, an answer that the target did not write, in the tokens in which it would have.

    They follow the generation prompt, and end with the first stop token or where the template's generation markers end.

    Raises TemplateRefuses: the template refuses the messages, or does not write the answer after its generation prompt.
    """
    before = render_turn(tokenizer, prompt, said[:-1], settings)
    ids, end = _rendered(tokenizer, prompt, said, settings)
    start = len(before)
    end = next((place + 1 for place in range(start, end) if ids[place] in stop_token_ids), end)
    if ids[:start] != before or end <= start:
        raise TemplateRefuses(
            f"{prompt.place or prompt.prompt_id}: the chat template does not write message {len(said)}, an answer, "
            "after its own generation prompt, so the target would not have written it so; leave it out, or set "
            "target.thinking as it was when it was written"
        )
    return Answer(prompt_ids=before, response_ids=ids[start:end], finish_reason=GIVEN, said=len(said))


def _rendered(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, said: Sequence[Message], settings: Settings
) -> tuple[list[int], int]:
    """The ids, and their end, or that of the last marked token if the template has generation markers."""
    if not GENERATION.search(tokenizer.get_chat_template(None, None)):
        ids = render_turn(tokenizer, prompt, said, settings, answered=True)
        return ids, len(ids)
    found = render_turn(
        tokenizer, prompt, said, settings, answered=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
    return ids, len(mask) - mask[::-1].index(1) if 1 in mask else 0


def generated_sample(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    max_length: int,
    *,
    spans: Sequence[Sequence[int]] | None = None,
    row: str = "this row",
) -> tuple[list[int], list[Span]]:
    """Ids and spans of labels of a row of `train.jsonl`, cut to `max_length`; what is kept of an answer stays a label.

    `spans` are the row's, where it has more than its last answer. None is left when the prompt alone fills the length.
    """
    if not prompt_ids:
        raise UserError(f"{row}: there is no prompt before the answer, so every token would be supervised")
    ids = [*prompt_ids, *response_ids]
    whole = [(len(prompt_ids), len(ids))] if spans is None else spans
    kept = [(start, min(end, max_length)) for start, end in whole if start < min(end, max_length)]
    return ids[:max_length], kept


def supervised_tokens(row: Mapping[str, Any]) -> int:
    """Of a row of `train.jsonl`."""
    spans = row.get("spans")
    return len(row["response_ids"]) if spans is None else sum(end - start for start, end in spans)
