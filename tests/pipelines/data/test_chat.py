"""Chat templates: prompt ids, supervised spans, thinking, and the masks that must raise."""

from datetime import datetime

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import _compile_jinja_template

from pipelines.data.chat import (
    answer_message,
    reads_the_clock,
    render_prompt,
    render_text,
    thinks,
)
from pipelines.errors import UserError

CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As Qwen3 does it: thinking off supplies an empty thought, which history drops except in the last answer.
THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last and '<think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WITH_BOS = "<|bos|>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
REFUSING = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
RESPONSE = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {"thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|end|>"}},
}
QUESTION = [{"role": "user", "content": "How are you?"}]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that puts a BOS in front of plain text, as many do."""
    special = ["<|end|>", "<|start|>", "<|bos|>"]
    vocab = {token: index for index, token in enumerate([*special, *bytes_to_unicode().values()])}
    backend = Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 2)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", bos_token="<|bos|>")
    made.chat_template = template
    made.name_or_path = "toy/model"
    return made


STOP = (0,)


def test_a_thought_that_the_prompt_supplies_belongs_to_the_prompt() -> None:
    model = tokenizer(THINKING)
    assert model.decode(render_prompt(model, QUESTION, thinking=False)).endswith("<think>\n\n</think>\n\n")
    assert model.decode(render_prompt(model, QUESTION, thinking=True)).endswith("assistant\n")


def test_there_is_one_bos() -> None:
    model = tokenizer(WITH_BOS)
    ids = render_prompt(model, QUESTION, thinking=False)
    assert ids.count(2) == 1
    assert ids == model(model.apply_chat_template(QUESTION, tokenize=False), add_special_tokens=False)["input_ids"]
    with pytest.raises(UserError, match="two BOS tokens"):
        render_prompt(tokenizer("<|bos|>" + WITH_BOS), QUESTION, thinking=False)


def test_refusals_name_the_row() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        render_prompt(tokenizer(None), QUESTION, thinking=False)
    messages = [{"role": "system", "content": "x"}, *QUESTION]
    with pytest.raises(UserError, match=r"row 3: the chat template .* refuses this conversation: no system role"):
        render_prompt(tokenizer(REFUSING), messages, thinking=False, row="row 3")


NOW = datetime(2021, 3, 4, 15, 6, 7)


@pytest.mark.parametrize(
    "template",
    [
        "\n  {% if true %}a{% endif %}\n{{ strftime_now('%d %B %Y, %-I %% %H:%M:%S %%d') }}",
        "  {% set x = 1 %}{{ strftime_now('%c') }}\n\n",
        "{% macro day() %}{{ strftime_now('%A %j') }}{% endmacro %}{{ day() }}",
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}",
    ],
)
def test_a_template_that_asks_the_clock_is_given_the_runs_time(template: str) -> None:
    """As transformers' own environment would write it at that time."""
    compiled = _compile_jinja_template(template)
    compiled.globals["strftime_now"] = NOW.strftime
    model = tokenizer(template)
    assert render_text(model, QUESTION, thinking=False, now=NOW) == compiled.render()
    assert reads_the_clock(model)
    assert not reads_the_clock(tokenizer(CHATML))


def test_tools_reach_the_template() -> None:
    model = tokenizer("{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}" + CHATML)
    assert render_text(model, QUESTION, thinking=False, tools=[{"name": "weather"}]).startswith("weather")
    assert not render_text(model, QUESTION, thinking=False).startswith("weather")


def test_an_answer_becomes_history_as_the_tokenizer_says() -> None:
    """By its response template where it has one, and as the plain text before the stop token where it has none."""
    model = tokenizer(CHATML)
    prompt = render_prompt(model, QUESTION, thinking=False)
    output = model("<think>hm</think>Well.", add_special_tokens=False)["input_ids"] + [0]
    plain = {"role": "assistant", "content": "<think>hm</think>Well."}
    assert answer_message(model, prompt, output, STOP) == plain
    assert answer_message(model, prompt, output[:-1], STOP) == plain
    model.response_template = RESPONSE
    assert answer_message(model, prompt, output, STOP) == {"role": "assistant", "content": "Well.", "thinking": "hm"}


def test_mixed_thinking_is_a_pure_function_of_seed_and_id() -> None:
    drawn = [thinks("mixed", 0, str(index)) for index in range(400)]
    assert drawn == [thinks("mixed", 0, str(index)) for index in range(400)]
    assert 150 < sum(drawn) < 250
    assert drawn != [thinks("mixed", 1, str(index)) for index in range(400)]
    assert thinks("on", 0, "x")
    assert not thinks("off", 0, "x")
