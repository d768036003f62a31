"""The messages in a row of a data set, whatever shape it has, as chat templates take them.

| a row has | its messages |
| --- | --- |
| `messages`, `conversations` | `role` and `content`, or ShareGPT's `from` and `value` |
| `prompt`, with `response` or `completion` | a question (a text or messages) and its answer |
| `instruction`, with `input`, `output` and `system` | as in Alpaca |
| `turns` | the user's words, in order |

Beside them it may have `tools`. A message's content is a text or a list of text parts; an assistant's may have
`tool_calls` and `reasoning_content`. A column that is null is one that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelines.errors import UserError
from pipelines.json_files import parse_json

Message = dict[str, Any]
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    "system": "system",
    "developer": "developer",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
SHAPES = "`messages` or `conversations`, `prompt`, `instruction` or `turns`"


def read_messages(row: Mapping[str, Any], place: str) -> list[Message]:
    """The row's messages. Raises UserError, which begins with the place, for a row of another shape.

    The content of an assistant's message that is no text is null: whoever uses the answer refuses it.
    """
    if (turns := value_of(row, "turns")) is not None:
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise UserError(f"{place}: `turns` must be a list of texts, found {str(turns)[:80]!r}")
        return [{"role": "user", "content": turn} for turn in turns]
    found = value_of(row, "conversations", "messages")
    if found is None and (found := value_of(row, "prompt")) is not None:
        found = [{"role": "user", "content": found}] if isinstance(found, str) else found
        found = _with_answer(found, value_of(row, "response", "completion"))
    elif found is None and (found := value_of(row, "instruction")) is not None:
        if more := value_of(row, "input"):
            found = f"{found}\n\n{more}"
        found = _with_answer([{"role": "user", "content": found}], value_of(row, "output", "response"))
        if system := value_of(row, "system"):
            found = [{"role": "system", "content": system}, *found]
    if not isinstance(found, list):
        given = [key if row[key] is not None else f"{key} (null)" for key in row]
        raise UserError(f"{place}: a row needs {SHAPES}; it has {', '.join(map(str, given)) or 'nothing'}")
    return [_message(message, place) for message in found]


def read_tools(row: Mapping[str, Any], place: str) -> tuple[dict[str, Any], ...]:
    """The row's tools as JSON schemas; a data set may keep them as a text, and fill up their keys with nulls."""
    tools = value_of(row, "tools")
    if isinstance(tools, str):
        tools = parse_json(tools.encode(errors="surrogatepass"), f"{place}: `tools`") if tools.strip() else None
    tools = [] if tools is None else _without_nulls(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: `tools` must be a list of JSON schemas, found {str(tools)[:80]!r}")
    try:
        json.dumps(tools)
    except TypeError as error:
        raise UserError(f"{place}: `tools` must be a list of JSON schemas: {error}") from None
    return tuple(tools)


def value_of(row: Mapping[str, Any], *names: str) -> Any:
    """The first of these columns that is there and not null."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def is_call(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _with_answer(asked: Any, answer: Any) -> Any:
    if answer is None or not isinstance(asked, list):
        return asked
    return [*asked, *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])]


def _message(found: Any, place: str) -> Message:
    role = ROLES.get(str(value_of(found, "role", "from")), "") if isinstance(found, dict) else ""
    content = value_of(found, "content", "value") if role else None
    text = _text(content)
    if role == "tool" and text is None:
        text = json.dumps(content, ensure_ascii=False, default=str)
    if not role or (text is None and role != "assistant"):
        raise UserError(
            f"{place}: a message needs a role (system, developer, user, assistant or tool) and a text, or a list of "
            f"texts, as content, found {str(found)[:80]!r}"
        )
    message: Message = {"role": role, "content": text}
    if role == "assistant":
        calls = _calls(value_of(found, "tool_calls", "function_call"))
        if found.get("from") == "function_call":
            calls, message["content"] = _calls(text), ""
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if isinstance(thought := value_of(found, *REASONING), str) and thought:
            message["reasoning_content"] = thought
    if role == "tool":
        message |= {key: found[key] for key in ("name", "tool_call_id") if isinstance(found.get(key), str)}
    return message


def _text(content: Any) -> str | None:
    """A text, or text parts joined; None for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None


def _calls(found: Any) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, their arguments as an object; none where they cannot be read as calls."""
    found = _without_nulls(_parsed(found))
    found = [found] if isinstance(found, dict) else found
    calls = []
    for call in found if isinstance(found, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return []
        arguments = _parsed(value_of(function, "arguments", "parameters"))
        name = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        named = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        calls.append({**name, "type": "function", "function": named})
    return calls


def _parsed(value: Any) -> Any:
    """What a text of JSON says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict | list) else value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
