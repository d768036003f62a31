"""llama.cpp drafts from what we publish, for tied and untied targets, full and reduced draft vocabularies.

The models are tiny and random, made so that drafts of every length are accepted; the tokenizer is the packaged
target's. No run is needed.

V vocabulary, d hidden size.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from llamacpp.comparison import Round, RoundAgreement, compare_rounds, first_difference, place
from llamacpp.results import record
from llamacpp.server import serve
from llamacpp.toolchain import LlamaCpp, prepare
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.decoding.decoder import Completion, Decoder, Request, SamplingConfig
from dspark.decoding.target import Target
from dspark.models.dspark import DSpark
from pipelines.data.packaged_target import packaged_target
from pipelines.publishing.publication import Publication, publish

CACHE = Path(os.environ.get("DSPARK_ENGINES_CACHE", Path(__file__).resolve().parents[2] / ".engines"))
LAYERS = (0, 2, 3)
TOKENS = 64
PROMPTS = ([1, 4093, 198, 19556, 2], [44, 8, 4, 15, 16, 2, 9], [3, 1000, 2000, 3000, 4000, 5000])


@pytest.fixture(scope="module")
def tools() -> LlamaCpp:
    return prepare(CACHE)


@torch.no_grad()
def tiny_target(folder: Path, *, tied: bool) -> Target:
    """Five random layers, hidden size 64, the real vocabulary; the next token depends mostly on the last one."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).float()
    model.model.embed_tokens.weight.normal_(0, 1)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.normal_(0, 0.1)
        layer.mlp.down_proj.weight.normal_(0, 0.25)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(packaged_target("smollm2-135m-instruct") / name, folder)
    return Target.open(folder, dtype="float32", device="cpu", target_layer_ids=LAYERS)


@torch.no_grad()
def drafter_for(target: Target, draft_vocab: int | None) -> DSpark:
    """Random layers and context projection; a Markov head that knows what usually follows the last token."""
    rank = target.hidden_size + (draft_vocab is not None)
    config = DrafterConfig.for_target(
        target.text_config,
        mask_token_id=16,
        target_layer_ids=target.layer_ids,
        num_draft_layers=2,
        markov_rank=rank,
        draft_vocab_size=draft_vocab,
    )
    drafter = DSpark(config)
    drafter.initialise_random(seed=3)
    drafter.share_target(target.embed_tokens.weight, target.lm_head.weight)
    tokens = torch.arange(target.vocab_size)[:, None]
    head = drafter.markov_head
    assert head is not None
    for start in range(0, len(tokens), 4096):
        alone = target.capture(tokens[start : start + 4096]).last_hidden_state[:, 0]
        head.markov_w1.weight[start : start + 4096, : target.hidden_size] = alone
    head.markov_w2.weight[:, : target.hidden_size] = target.lm_head.weight
    drafter.norm.weight.fill_(0.4)
    if draft_vocab is not None:
        tokens = torch.arange(target.vocab_size)
        drafter.restrict_vocabulary(tokens[tokens % 3 != 0])
    return drafter.eval()


def publish_tiny(drafter: DSpark, target: Target, folder: Path) -> None:
    """Through the publisher and its checks, as `dspark publish` does."""
    config = drafter.config
    hashes = target.hashes()
    contract = Contract(
        target_name="tiny",
        target_revision=None,
        thinking="off",
        target_layer_ids=config.target_layer_ids,
        final_norm_applied=True,
        block_layout=config.block_layout,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        **hashes,
    )
    publish(Publication(name="tiny", drafter=drafter, target=target, contract=contract), folder)


def decode(target: Target, drafter: DSpark | None) -> dict[str, Completion]:
    requests = [
        Request(
            request_id=str(index),
            prompt_ids=list(prompt),
            max_new_tokens=TOKENS,
            stop_token_ids=target.stop_token_ids,
            seed=0,
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    decoder = Decoder(target, drafter, sampling=SamplingConfig(temperature=0.0), record_gaps=True)
    return {completion.request_id: completion for completion in decoder.generate(requests)}


@pytest.mark.parametrize("draft_vocab", [None, 32768], ids=["full-vocabulary", "reduced-vocabulary"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_drafts_and_acceptance_are_ours(tied: bool, draft_vocab: int | None, tmp_path: Path, tools: LlamaCpp) -> None:
    torch.set_num_threads(1)  # models this small only lose time to threads
    target = tiny_target(tmp_path / "target", tied=tied)
    drafter = drafter_for(target, draft_vocab)
    publish_tiny(drafter, target, tmp_path / "published")
    plain, ours = decode(target, None), decode(target, drafter)

    target_gguf = tools.convert_target(tmp_path / "target", keep=tmp_path)
    drafter_gguf = tools.convert_drafter(tmp_path / "published", tmp_path / "target", keep=tmp_path)
    log = tmp_path / "server.log"
    total = RoundAgreement()
    with serve(tools, target_gguf, drafter_gguf, block_size=7, context=512, threads=1, log=log) as server:
        for index, prompt in enumerate(PROMPTS):
            answer = server.complete(prompt, TOKENS)
            mine = ours[str(index)]
            assert first_difference(plain[str(index)].output_ids, mine.output_ids) is None
            assert first_difference(plain[str(index)].output_ids, answer.output_ids) is None
            rounds = [
                Round(position=r.position, draft_ids=tuple(r.draft_ids), accepted=r.accepted_raw) for r in mine.rounds
            ]
            total += compare_rounds(rounds, place([(r.draft_ids, r.accepted) for r in answer.rounds]), TOKENS)
    name = f"{'tied' if tied else 'untied'} target, draft vocabulary {draft_vocab or 'full'}"
    record("llama-cpp-layouts.json", name, total.figures())
    assert total.same_drafts == total.same_accepted == total.ours == total.engine
    assert total.ours_accepted > total.ours // 2, "nothing is accepted: this proves little"
