"""Conversations as token ids, by the target's own chat template.

Rendering and tokenising are one call to the template, so a BOS token that the template writes comes once. Tokens that
the generation prompt supplies (an empty `<think></think>` among them) belong to the prompt and are never labels.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from jinja2.exceptions import TemplateError

from dspark.decoding.decoder import Request
from pipelines.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipelines.data.conversations import Prompt
    from pipelines.settings.schema import Settings
    from pipelines.target_spec import TargetSpec

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what marks a template's answers
CLOCK = "strftime_now"  # what a chat template calls to learn the date
DIRECTIVES = [*(f"%-{letter}" for letter in "dmHIMSjy"), *(f"%{letter}" for letter in "aAbBcdHIjmMpSUwWxXyYZz")]
# `strftime_now` as a macro: the format with every directive replaced. The line's end is no part of the template.
MACRO = (
    "{%- macro strftime_now(format) -%}{%- set found = namespace(text=format) -%}"
    "{%- for directive, value in TABLE.items() -%}"
    "{%- set found.text = found.text | replace(directive, value) -%}{%- endfor -%}"
    "{{- found.text -}}{%- endmacro %}\n"
)


class TemplateRefuses(UserError):
    """The chat template raises for this conversation."""


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


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    thinking: bool,
    row: str = "this row",
    tools: Tools = (),
    now: datetime | None = None,
    tokenize: bool = False,
    answered: bool = False,
    **options: Any,
) -> Any:
    """The conversation up to where the target begins to answer, as the template writes it.

    A developer speaks as the system where the template has no such role.

    Args:
        row: the conversation's place, for messages.
        answered: the last message is the answer, and nothing begins after it.
        options: more for `apply_chat_template`.
        tools: JSON schemas, for templates that show them.
        now: what the template takes for the time; None asks the clock.
        tokenize: give its token ids instead.

    Raises:
        UserError: there is no template, or (TemplateRefuses) it refuses the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            f"{_template(tokenizer)} has no chat template; use an instruction-tuned target, or add one to it"
        )
    schemas: Any = [dict(tool) for tool in tools] or None
    template = tokenizer.get_chat_template(None, schemas)
    clocked = template if now is None or CLOCK not in template else _clock(now) + template
    options = {"return_dict": False, "enable_thinking": thinking, "tools": schemas, "tokenize": tokenize, **options}
    said = [dict(message) for message in messages]
    if "developer" not in template:
        said = [{**message, "role": "system"} if message["role"] == "developer" else message for message in said]
    try:
        if any("tool_calls" in message for message in said):
            said = _fit_calls(tokenizer, said, {**options, "chat_template": clocked})
        return tokenizer.apply_chat_template(said, chat_template=clocked, add_generation_prompt=not answered, **options)
    except (TemplateError, TypeError) as error:  # TypeError: the template adds up what this row lacks
        raise TemplateRefuses(
            f"{row}: the chat template of {_template(tokenizer)} refuses this conversation: {error}"
        ) from error


def _fit_calls(tokenizer: PreTrainedTokenizerBase, said: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """The arguments of tool calls as an object, or as a text of JSON where the template does not write objects so."""
    as_text = copy.deepcopy(said)
    written = []
    for message in as_text:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if not isinstance(function["arguments"], str):
                written.append(str(function["arguments"]))
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    try:
        text = tokenizer.apply_chat_template(said, **{**options, "tokenize": False, "return_dict": False})
    except (TemplateError, TypeError):
        return as_text
    return as_text if any("'" in shown and shown in text for shown in written) else said


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, row: str = "this row", **options: Any
) -> Any:
    """The token ids of what `render_text` gives; with `return_dict`, what transformers gives."""
    found = render_text(tokenizer, messages, row=row, tokenize=True, **options)
    ids = list(found["input_ids"] if options.get("return_dict") else found)
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise UserError(f"{row}: the chat template of {_template(tokenizer)} begins with two BOS tokens ({bos})")
    return found if options.get("return_dict") else ids


def render_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    said: Sequence[Message],
    settings: Settings,
    *,
    tokenize: bool = True,
    **options: Any,
) -> Any:
    """Ids (or text) of a prompt's conversation so far, rendered as everything in this run is.

    `options` are those of `render_text`.
    """
    render = render_prompt if tokenize else render_text
    return render(
        tokenizer,
        said,
        thinking=thinks(settings.target.thinking, settings.run.seed, prompt.prompt_id),
        row=prompt.place or prompt.prompt_id,
        tools=prompt.tools,
        now=settings.data.render_time,
        **options,
    )


def make_request(request_id: str, ids: list[int], max_new_tokens: int, spec: TargetSpec, seed: int) -> Any:
    """A decoding request whose random draws depend on the run's seed and its own id alone.

    It asks for no more tokens than the target's context has room for.
    """
    room = max_new_tokens if spec.max_positions is None else spec.max_positions - len(ids)
    return Request(
        request_id=request_id,
        prompt_ids=ids,
        max_new_tokens=max(1, min(max_new_tokens, room)),
        stop_token_ids=frozenset(spec.stop_token_ids),
        seed=zlib.crc32(f"{seed}/{request_id}".encode()),
    )


def reads_the_clock(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts depend on when they are rendered."""
    return CLOCK in json.dumps(getattr(tokenizer, "chat_template", None) or "")


@lru_cache(maxsize=4)
def _clock(now: datetime) -> str:
    table = {directive: now.strftime(directive) for directive in DIRECTIVES}
    return MACRO.replace("TABLE", json.dumps({"%%": "\0", **table, "\0": "%"}))


def answer_message(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    stop_token_ids: Sequence[int],
    tools: Tools = (),
) -> Message:
    """The target's answer as a message, for the next turn; in parts where the tokenizer says how to tell them apart."""
    if getattr(tokenizer, "response_template", None):
        try:
            parsed = tokenizer.parse_response(list(output_ids), prefix=list(prompt_ids), tools=[dict(t) for t in tools])
            return {"role": "assistant", "content": "", **parsed}
        except (ValueError, TypeError, KeyError):  # an answer that was cut, or goes wrong: as it is
            pass
    kept = output_ids[:-1] if output_ids and output_ids[-1] in stop_token_ids else output_ids
    return {"role": "assistant", "content": tokenizer.decode(list(kept))}


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
