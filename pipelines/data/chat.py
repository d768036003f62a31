"""Conversations as token ids, by the target's own chat template, and which of them are supervised.

Rendering and tokenising are one call to the template, so a BOS token that the template writes comes once. Tokens that
the generation prompt supplies (an empty `<think></think>` among them) belong to the prompt and are never supervised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pipelines.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Span = tuple[int, int]


def thinks(mode: Literal["off", "on", "mixed"], seed: int, prompt_id: str) -> bool:
    """Whether this prompt is answered with thinking on; `mixed` decides by (seed, prompt id), half and half."""
    if mode != "mixed":
        return mode == "on"
    return hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[0] % 2 == 1


def require_thinking_switch(tokenizer: PreTrainedTokenizerBase, mode: Literal["on", "mixed"]) -> None:
    """Raises UserError when the template writes the same prompt whether thinking is on or off."""
    question = [{"role": "user", "content": "Why?"}]
    on, off = (render_prompt(tokenizer, question, thinking=thinking) for thinking in (True, False))
    if on == off:
        raise UserError(
            f"target.thinking is {mode}, but the chat template of {_template(tokenizer)} has no thinking switch: it "
            "writes the same prompt for on and off; set target.thinking=off"
        )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, thinking: bool, row: str = "this row"
) -> list[int]:
    """Token ids up to where the target begins to answer. Raises UserError when there is no template, or it refuses."""
    return _render(tokenizer, messages, thinking=thinking, row=row, add_generation_prompt=True)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    thinking: bool,
    row: str,
    add_generation_prompt: bool,
) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{_template(tokenizer)} has no chat template; use an instruction-tuned target, or add one to it"
        )
    from jinja2.exceptions import TemplateError

    try:
        ids: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            return_dict=False,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=thinking,
        )
    except TemplateError as error:
        raise UserError(
            f"{row}: the chat template of {_template(tokenizer)} refuses this conversation: {error}"
        ) from error
    found = [int(token) for token in ids]
    bos = tokenizer.bos_token_id
    if bos is not None and found[:2] == [bos, bos]:
        raise UserError(f"{row}: the chat template of {_template(tokenizer)} begins with two BOS tokens ({bos})")
    return found


def supervised_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    stop_token_ids: frozenset[int],
    thinking: bool,
    row: str = "this row",
) -> tuple[list[int], list[Span]]:
    """Ids [S] of a whole conversation and its answers as half-open spans, the stop token included.

    Each answer is found by rendering the conversation up to it. Raises UserError, naming row and template, when no
    token or every token is supervised, or when the template rewrites what went before.
    """
    ids = _render(tokenizer, messages, thinking=thinking, row=row, add_generation_prompt=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], thinking=thinking, row=row, add_generation_prompt=False)
        opened = render_prompt(tokenizer, messages[:index], thinking=thinking, row=row)
        if ids[: len(before)] != before:
            raise UserError(
                f"{row}: the chat template of {_template(tokenizer)} writes message {index} differently once more "
                "follows, so answers cannot be located; let the target write its own answers (`dspark regenerate`)"
            )
        start = max(len(before), _common_prefix(ids, opened))
        stop = next((at for at in range(start, len(ids)) if ids[at] in stop_token_ids), None)
        if stop is None and index + 1 < len(messages):
            raise UserError(
                f"{row}: {_template(tokenizer)} writes no stop token after answer {index}, so its end is unknown"
            )
        end = len(ids) if stop is None else stop + 1
        if end > start:
            spans.append((start, end))
    check_spans(spans, len(ids), row=row, template=_template(tokenizer))
    return ids, spans


def check_spans(spans: Sequence[Span], length: int, *, row: str, template: str) -> None:
    """Raises UserError unless some tokens are supervised and some are not."""
    supervised = sum(end - start for start, end in spans)
    if supervised == 0:
        raise UserError(f"{row}: no token is supervised under {template}; the row has no answer")
    if supervised == length:
        raise UserError(f"{row}: every token is supervised under {template}; the row has no prompt")


def generated_sample(
    prompt_ids: Sequence[int], response_ids: Sequence[int], max_length: int, *, row: str = "this row"
) -> tuple[list[int], list[Span]]:
    """Ids and the one supervised span of an answer that the target wrote, cut to `max_length`.

    What is kept of the answer stays supervised. The span is empty (no span) when the prompt alone fills the length.
    """
    if not prompt_ids:
        raise UserError(f"{row}: there is no prompt before the answer, so every token would be supervised")
    ids = [*prompt_ids, *response_ids][:max_length]
    return ids, [(len(prompt_ids), len(ids))] if len(ids) > len(prompt_ids) else []


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
