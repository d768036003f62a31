"""Answers in the target's own tokens, under templates with the structure of those that people use."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pipelines.data.answers import GIVEN, Answer, generated_sample, given_answer, join_answers, supervised_tokens
from pipelines.data.chat import TemplateRefuses, answer_message, render_turn
from pipelines.data.conversations import Prompt, prompt_from_row
from pipelines.settings.schema import Settings

TEMPLATES = Path(__file__).parent / "templates"
STOPS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "</s>", "<|end|>", "<|endoftext|>")
STOPS_OF = {"gpt-oss": ("<|return|>", "<|call|>"), "deepseek": ("<｜end▁of▁sentence｜>",)}
# What answers end with: what the template writes after one.
END = {
    **dict.fromkeys(("smollm2", "marked", "qwen2.5", "qwen3"), "<|im_end|>"),
    **{"llama3": "<|eot_id|>", "gemma3": "<end_of_turn>", "gemma4": "<turn|>", "mistral": "</s>", "phi": "<|end|>"},
    **{"gpt-oss": "<|return|>", "deepseek": "<｜end▁of▁sentence｜>"},
}
# Before the words of an answer, what the target writes itself.
OPENS = {"gpt-oss": "<|channel|>final<|message|>"}
TOOLS = ({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},)


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has the template's special tokens."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    found = dict.fromkeys(
        re.findall(r"<[|｜][^<>{}\n]+?[|｜]>|<\|turn>|<turn\|>|<(?:bos|s|/s|start_of_turn|end_of_turn)>", template)
    )
    special = list(found) + [stop for stop in STOPS if stop not in found]
    vocab = {token: index for index, token in enumerate([*special, *bytes_to_unicode().values()])}
    # Runs of spaces and line ends are one token, as in most vocabularies.
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ")]
    vocab |= {"ĊĊ": len(vocab), "ĠĠ": len(vocab) + 1}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    made = PreTrainedTokenizerFast(tokenizer_object=backend)
    made.chat_template = template
    return made


def settings(thinking: str = "off") -> Settings:
    return Settings.model_validate({"run": {"directory": "r"}, "target": {"model": "m", "thinking": thinking}})


def stops(name: str, model: PreTrainedTokenizerFast) -> list[int]:
    return [model.convert_tokens_to_ids(stop) for stop in STOPS_OF.get(name, STOPS)]


def read(*messages: dict[str, Any], tools: Any = ()) -> Prompt:
    found = prompt_from_row({"id": "p", "messages": list(messages), "tools": list(tools)}, "f:1", split="train")
    assert found is not None
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def converse(name: str, prompt: Prompt, answers: list[str], thinking: str = "off") -> tuple[Any, list[list[Answer]]]:
    """The conversation with a target that writes these answers, and the rows that teach them."""
    model, wanted = tokenizer(name), settings(thinking)
    said: list[Any] = []
    found = []
    for turn, text in zip(prompt.turns, answers, strict=True):
        for message in turn:
            said.append(message)
            if message["role"] == "assistant":
                found.append(given_answer(model, prompt, said, wanted, stops(name, model)))
        ids = render_turn(model, prompt, said, wanted)
        output = model(text, add_special_tokens=False)["input_ids"]
        said.append(dict(answer_message(model, ids, output, stops(name, model), prompt.tools)))
        found.append(Answer(prompt_ids=ids, response_ids=output, finish_reason="stop", said=len(said)))
    return model, join_answers(found)


def taught(model: Any, rows: list[list[Answer]]) -> list[list[str]]:
    """The supervised texts of every row."""
    texts = []
    for row in rows:
        ids, spans = generated_sample(
            row[-1].prompt_ids, row[-1].response_ids, 10**6, spans=[answer.span for answer in row]
        )
        texts.append([model.decode(ids[start:end]) for start, end in spans])
    return texts


@pytest.mark.parametrize("name", sorted(END))
@pytest.mark.parametrize("thinking", ["off", "on"])
def test_a_given_answer_is_what_the_target_would_write(name: str, thinking: str) -> None:
    """The ids are the template's own, and every label is the target's: its words and the token that ends them."""
    model, wanted = tokenizer(name), settings(thinking)
    prompt = read(user("One?"))
    said = [*prompt.turns[0], {"role": "assistant", "content": "Two."}]
    if (name, thinking) == ("deepseek", "on"):  # its prompt opens a thought that the answer does not have
        with pytest.raises(TemplateRefuses, match=r"f:1: the chat template does not write message 2"):
            given_answer(model, prompt, said, wanted, stops(name, model))
        return
    opens = "<think>\n\n</think>\n\n" if (name, thinking) == ("qwen3", "on") else OPENS.get(name, "")
    if (name, thinking) == ("gemma4", "off"):
        with pytest.raises(TemplateRefuses):  # the empty thought of its prompt is not in what it writes as history
            given_answer(model, prompt, said, wanted, stops(name, model))
        return
    found = given_answer(model, prompt, said, wanted, stops(name, model))
    assert (found.finish_reason, found.said) == (GIVEN, 2)
    options: dict[str, Any] = {"return_dict": False, "enable_thinking": thinking == "on"}
    whole = model.apply_chat_template(said, **options)
    assert found.prompt_ids == model.apply_chat_template(prompt.turns[0], add_generation_prompt=True, **options)
    assert found.ids == whole[: len(found.ids)]
    assert model.decode(found.response_ids) == f"{opens}Two.{END[name]}"
    cut, spans = generated_sample(found.prompt_ids, found.response_ids, len(found.prompt_ids) + 2)
    assert [model.decode(cut[start:end]) for start, end in spans] == [model.decode(found.response_ids[:2])]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nTwo.<|im_end|>"),
        ("gemma4", "<|channel>thought\nhm<channel|>Two.<turn|>"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>",
        ),
    ],
)
def test_a_given_thought_is_taught(name: str, expected: str) -> None:
    model = tokenizer(name)
    prompt = read(user("One?"))
    said = [*prompt.turns[0], {"role": "assistant", "content": "Two.", "reasoning_content": "hm"}]
    found = given_answer(model, prompt, said, settings("on"), stops(name, model))
    assert model.decode(found.response_ids) == expected


JOINED = ("smollm2", "marked", "qwen2.5", "llama3", "gemma3", "mistral", "phi", "deepseek")


@pytest.mark.parametrize("name", sorted(END))
def test_all_answers_of_a_conversation_are_taught(name: str) -> None:
    """In one row where the template keeps history as it was written, and in one for each answer where it does not."""
    end, opens = END[name], OPENS.get(name, "")
    wrote = [f"{opens}{word}.{end}" for word in ("Two", "Four", "Six")]
    model, rows = converse(name, read(user("One?"), user("Three?"), user("Five?")), wrote)
    assert list(chain(*taught(model, rows))) == wrote
    if name in JOINED:
        assert [len(row) for row in rows] == [3]
        assert rows[0][-1].prompt_ids[: rows[0][0].span[1]] == rows[0][0].ids
    else:
        assert [len(row) for row in rows] == [1, 1, 1]
    for row in rows:
        assert supervised_tokens({"response_ids": [], "spans": [answer.span for answer in row]}) == sum(
            len(answer.response_ids) for answer in row
        )


def test_a_thought_that_history_drops_makes_a_row_a_turn() -> None:
    wrote = ["<think>\nhm\n</think>\n\nTwo.<|im_end|>", "<think>\nso\n</think>\n\nFour.<|im_end|>"]
    model, rows = converse("qwen3", read(user("One?"), user("Three?")), wrote, "on")
    assert taught(model, rows) == [[wrote[0]], [wrote[1]]]
    assert "hm" not in model.decode(rows[1][0].prompt_ids)


def test_a_text_with_other_tokens_than_the_target_wrote_does_not_join() -> None:
    prompt = read(user("One?"), user("Three?"))
    _, rows = converse("smollm2", prompt, ["Two.<|im_end|>", "Four.<|im_end|>"])
    assert len(rows) == 1
    first, second = rows[0]
    other = Answer(prompt_ids=first.prompt_ids, response_ids=first.response_ids[:-2], finish_reason="stop", said=2)
    odd = Answer(prompt_ids=other.prompt_ids, response_ids=[*other.response_ids, 7, 7], finish_reason="stop", said=2)
    assert len(join_answers([odd, second])) == 2


CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
WROTE_CALL = {
    "qwen2.5": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
    "qwen3": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eot_id|>',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]</s>',
    "gpt-oss": ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
    "deepseek": '<｜tool▁calls▁begin｜>get_weather\n```json\n{"city": "Oslo"}\n```<｜tool▁calls▁end｜>'
    "<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("name", sorted(WROTE_CALL))
def test_tool_calls_are_taught_and_results_are_not(name: str) -> None:
    """Calls and results stay where they are; arguments are what the template wants, an object or a text."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "-3", "tool_call_id": "call12345"},
        {"role": "assistant", "content": "It is -3."},
        user("So?"),
    ]
    if name in ("mistral",):
        messages = messages[1:]
    prompt = read(*messages, tools=TOOLS)
    assert (len(prompt.turns), prompt.count_answers()) == (2, 3)
    end, opens = END[name], OPENS.get(name, "")
    wrote = [f"{opens}Cold.{end}", f"{opens}Stay.{end}"]
    model, rows = converse(name, prompt, wrote)
    assert list(chain(*taught(model, rows))) == [WROTE_CALL[name], *wrote]
    whole = model.decode(rows[-1][-1].ids)
    assert "-3" in whole
    assert "It is" not in whole
    assert "-3" not in "".join(list(chain(*taught(model, rows))))


def test_what_is_kept_of_a_cut_answer_stays_a_label() -> None:
    assert generated_sample([1, 2, 3], [4, 5, 6], 5) == ([1, 2, 3, 4, 5], [(3, 5)])
    assert generated_sample([1, 2, 3], [4, 5, 6], 100) == ([1, 2, 3, 4, 5, 6], [(3, 6)])
    assert generated_sample([1, 2, 3], [4, 5, 6], 3) == ([1, 2, 3], [])

    assert generated_sample([1, 2, 3], [4, 5], 4, spans=[(1, 2), (3, 5)]) == ([1, 2, 3, 4], [(1, 2), (3, 4)])
    assert generated_sample([1, 2, 3], [4, 5], 3, spans=[(1, 2), (3, 5)]) == ([1, 2, 3], [(1, 2)])
