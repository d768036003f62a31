"""Tiny random targets of every decoder-only family of transformers that a generic configuration can make.

`python tests/dspark/target_zoo.py > docs/targets.md` writes what becomes of each.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from table_models import ScriptedProposer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from dspark.decoding.decoder import Decoder, Request
from dspark.decoding.target import Target, TargetError
from dspark.decoding.target_checks import check_target

# Taken where a family's configuration has such a setting.
SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "vocab_size_per_layer_input": 97, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "index_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **{"sliding_window": 16, "attention_chunk_size": 16, "index_n_heads": 2, "index_topk": 512},
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "lightning_head_dim"), 8),
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "mamba_d_state": 8, "mamba_n_heads": 4},
    **{"mamba_d_head": 16, "mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "state_size": 8},
    **{"n_groups": 1, "mamba_n_groups": 1},
}
ALL_HEADS = {"num_key_value_heads": 4}
HEAD = {"head_dim": 8}
EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64

PLAIN = """
afmoe apertus arcee aria_text beam biogpt bitnet bloom cohere cohere2 cohere2_moe ctrl cwm deepseek_v4 diffllama
doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text glm
glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared
helium hrm_text hy_v3 hy_v4 hyperclovax inkling_text jais2 jetmoe kolibri1 laguna lara_mini lfm2 lfm3 llama
llama4_text mamba mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral
modernbert-decoder mpt nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rwkv seed_oss smollm3 solar_open
stablelm starcoder2 vaultgemma xglm
"""
LATENT = "axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu"

# Family, or family and what is special about this one: what its configuration has beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(LATENT.split(), ALL_HEADS),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), HEAD),
    "deepseek_v2": {**ALL_HEADS, "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "bailing_hybrid": {},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gemma4_text": {**HEAD, **EVERY_OTHER},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "nemotron": {**HEAD, "num_key_value_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
    "granite, scaled": {"logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "llama, rotary llama3": {"rope_parameters": LLAMA3},
    "llama, rotary dynamic": {"rope_parameters": DYNAMIC},
    "phi3, LongRoPE": LONGROPE,
    "phimoe, head with bias": {"lm_head_bias": True},
    "qwen3, rotary yarn": {"rope_parameters": YARN},
    "qwen2, sliding": {"use_sliding_window": True, "max_window_layers": 2},
}


def tiny_model(name: str) -> Any:
    """A random model of a family, its weights large enough for every part to matter."""
    kind = name.partition(",")[0]
    made = CONFIG_MAPPING[kind]().get_text_config()
    known = {key for key, value in made.to_dict().items() if value is not None}
    known |= {"pad_token_id", "eos_token_id", "bos_token_id"} | set(made.attribute_map)
    config = type(made)(**{key: value for key, value in SIZES.items() if key in known} | FAMILIES[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in key:
                parameter.normal_(0, 0.15)
            elif "bias" in key or "sink" in key:
                parameter.normal_(0, 0.5)
    return model


def verdict(name: str) -> tuple[str, str]:
    """("right", ""), ("refused", why) or ("wrong", where): what becomes of a family's tiny model."""
    model = tiny_model(name)
    model(torch.arange(3, 20)[None], use_cache=False)
    try:
        layers = len(getattr(model.get_decoder(), "layers", [0]))
        target = Target(model, target_layer_ids=sorted({0, layers // 2}), name=name)
        check_target(target)
    except TargetError as error:
        reason = str(error).removeprefix(f"{name}: ").removeprefix(f"{type(model).__name__} ")
        return "refused", " ".join(reason.partition(" (option")[0].partition(": a decoder with")[0].split())
    try:
        require_right(target)
    except AssertionError as error:
        return "wrong", str(error)
    return "right", ""


@torch.no_grad()
def require_right(target: Target) -> None:
    """Raises AssertionError unless capture and greedy decoding with a drafter at random are the model's own."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (size,), generator=generator).tolist() for size in (5, 23, 11)]
    requests = [Request(request_id=str(n), prompt_ids=ids, max_new_tokens=8) for n, ids in enumerate(prompts)]
    proposer = ScriptedProposer(lambda history, slots: ([(sum(history) + n) % 97 for n in range(slots)], 0.0), 3, 97)
    for completion in Decoder(target, proposer, max_rows=2).generate(requests):
        text = torch.tensor([completion.prompt_ids + completion.output_ids])
        own = target.model(input_ids=text, use_cache=False, output_hidden_states=True)
        rows = torch.zeros(2, 40, dtype=torch.long)
        rows[0, : text.shape[1]] = text
        mask = torch.ones_like(rows)
        mask[0, text.shape[1] :] = 0
        captured = target.capture(rows, mask, logits=True)
        assert captured.logits is not None
        states = torch.cat([own.hidden_states[layer + 1] for layer in target.layer_ids], -1)
        pairs = (("hidden states", captured.hidden_states, states), ("logits", captured.logits, own.logits))
        for what, ours, theirs in pairs:
            close = torch.allclose(ours[:1, : text.shape[1]], theirs, atol=1e-4, rtol=1e-4)
            assert close, f"{what} of request {completion.request_id}"
        answered = own.logits[0, len(completion.prompt_ids) - 1 : -1]
        short = answered.amax(-1) - answered.gather(-1, text[0, len(completion.prompt_ids) :, None])[:, 0]
        assert float(short.max()) < 1e-3, f"greedy answer of request {completion.request_id}"


DOC = """# Targets

What a target must be: a decoder-only model of transformers whose attention goes through transformers' interface. Its
configuration is examined before any weight is loaded, and the model when it is opened, before the first answer is
written. Opening compares, on two short texts of unlike length:

- the head times the last hidden state with the model's logits;
- captured hidden states with the model's own;
- a short row beside a long one with each alone;
- three rounds of decoding of both rows with drafts, some of them wrong, with the model's plain forward pass.

What differs by more than rounding is refused with what differs. The bound is a mean over tokens, relative: 8 machine
epsilons of `target.dtype`, 1e-4 at least, or 5 times what the model's own states change by when later tokens are cut
off. `target-check.json` in the run's directory keeps the figures; the comparison is done anew where the weights, the
precision, the kind of device, the versions or the code have changed. An argument that our attention does not know is an
error, never ignored; so is a mask that is neither causal nor causal within a window.

Rotary factors that change with length (LongRoPE, dynamic) change for all rows of a batch at once. Such targets are used
up to the length at which they change (`original_max_position_embeddings`); longer prompts count as not fitting the
context.

An id that the tokenizer does not have is never read: not in a prompt, not in a cached row. A drafter's mask token is
often such an id. An answer in which the target writes one ends before it (finish reason `no token`). Logits that are
not finite end the run with the request and the place.

## Tried

Tiny random models in float32, one a family (transformers {version}). Right: greedy decoding with random drafts gives
the model's own answer, and captured states and logits are its own. `tests/dspark/test_target_zoo.py` tries them all;
`python tests/dspark/target_zoo.py > docs/targets.md` writes this page.

{right} right, {refused} refused, {wrong} wrong without a word.

| family | | why |
| --- | --- | --- |
"""


def main() -> None:
    import transformers

    # Verdicts go to standard output alone.
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    found = {}
    for name in sorted(FAMILIES):
        found[name] = verdict(name)
        print(name, *found[name], file=sys.stderr, flush=True)
    counts = {kind: sum(what == kind for what, _ in found.values()) for kind in ("right", "refused", "wrong")}
    rows = [f"| {name} | {what} | {why.replace('|', '/')} |" for name, (what, why) in found.items()]
    sys.stdout.write(DOC.format(version=transformers.__version__, **counts) + os.linesep.join(rows) + "\n")


if __name__ == "__main__":
    main()
