"""Chat templates: prompt ids, supervised spans, thinking, and the masks that must raise."""

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pipelines.data.chat import check_spans, generated_sample, render_prompt, supervised_spans, thinks
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
QUESTION = [{"role": "user", "content": "How are you?"}]
CHAT = [
    *QUESTION,
    {"role": "assistant", "content": "Well, thanks."},
    {"role": "user", "content": "And the weather?"},
    {"role": "assistant", "content": "It rains."},
]


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


STOP = frozenset({0})


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_the_mask_of_a_two_turn_chat_is_both_answers(template: str) -> None:
    model = tokenizer(template)
    ids, spans = supervised_spans(model, CHAT, stop_token_ids=STOP, thinking=False)
    assert [model.decode(ids[start:end]) for start, end in spans] == ["Well, thanks.<|end|>", "It rains.<|end|>"]
    assert ids == model.apply_chat_template(CHAT, return_dict=False)


def test_a_thought_that_the_prompt_supplies_is_not_supervised() -> None:
    model = tokenizer(THINKING)
    prompt = render_prompt(model, QUESTION, thinking=False)
    _, spans = supervised_spans(model, CHAT[:2], stop_token_ids=STOP, thinking=False)
    assert model.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert spans[0][0] == len(prompt)


def test_a_thought_that_the_target_writes_is_supervised() -> None:
    model = tokenizer(THINKING)
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nWell."}
    ids, spans = supervised_spans(model, [*QUESTION, answer], stop_token_ids=STOP, thinking=True)
    assert model.decode(ids[slice(*spans[0])]) == answer["content"] + "<|end|>"


def test_there_is_one_bos() -> None:
    model = tokenizer(WITH_BOS)
    ids = render_prompt(model, QUESTION, thinking=False)
    assert ids.count(2) == 1
    assert ids == model(model.apply_chat_template(QUESTION, tokenize=False), add_special_tokens=False)["input_ids"]
    with pytest.raises(UserError, match="two BOS tokens"):
        render_prompt(tokenizer("<|bos|>" + WITH_BOS), QUESTION, thinking=False)


def test_masks_of_nothing_or_of_everything_raise_with_row_and_template() -> None:
    with pytest.raises(UserError, match=r"row 7: no token is supervised under toy/model"):
        supervised_spans(tokenizer(CHATML), QUESTION, stop_token_ids=STOP, thinking=False, row="row 7")
    with pytest.raises(UserError, match="every token is supervised"):
        check_spans([(0, 5)], 5, row="row", template="t")
    with pytest.raises(UserError, match="no prompt before the answer"):
        generated_sample([], [1, 2], 10)


def test_a_template_that_rewrites_history_is_refused() -> None:
    rewriting = "{{ messages | length }}" + CHATML
    with pytest.raises(UserError, match="writes message 1 differently"):
        supervised_spans(tokenizer(rewriting), CHAT, stop_token_ids=STOP, thinking=False)


def test_refusals_name_the_row() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        render_prompt(tokenizer(None), QUESTION, thinking=False)
    messages = [{"role": "system", "content": "x"}, *QUESTION]
    with pytest.raises(UserError, match=r"row 3: the chat template .* refuses this conversation: no system role"):
        render_prompt(tokenizer(REFUSING), messages, thinking=False, row="row 3")


def test_what_is_kept_of_a_cut_answer_stays_supervised() -> None:
    assert generated_sample([1, 2, 3], [4, 5, 6], 5) == ([1, 2, 3, 4, 5], [(3, 5)])
    assert generated_sample([1, 2, 3], [4, 5, 6], 100) == ([1, 2, 3, 4, 5, 6], [(3, 6)])
    assert generated_sample([1, 2, 3], [4, 5, 6], 3) == ([1, 2, 3], [])


def test_mixed_thinking_is_a_pure_function_of_seed_and_id() -> None:
    drawn = [thinks("mixed", 0, str(index)) for index in range(400)]
    assert drawn == [thinks("mixed", 0, str(index)) for index in range(400)]
    assert 150 < sum(drawn) < 250
    assert drawn != [thinks("mixed", 1, str(index)) for index in range(400)]
    assert thinks("on", 0, "x")
    assert not thinks("off", 0, "x")
