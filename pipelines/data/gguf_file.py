"""A Llama-architecture GGUF file turned into a folder that `from_pretrained` opens.

Steps:
1. read metadata and the table of tensors;
2. write `config.json` and `generation_config.json` from the metadata;
3. dequantise the tensors, undo llama.cpp's row order of the query and key projections, and save them in bf16;
4. rebuild the byte-level BPE tokenizer with its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from pipelines.errors import UserError

_CONTROL_TOKEN = 3

# Names inside a block, as llama.cpp and as transformers write them.
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_gguf(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    """(metadata, tensors) of a GGUF file. Raises UserError for anything else."""
    try:
        reader = GGUFReader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a whole GGUF file ({error}): fetch it again") from error


def convert_llama(path: Path, folder: Path) -> None:
    """Write `folder` (which exists) from a Llama-architecture GGUF file with a byte-level BPE tokenizer."""
    meta, tensors = read_gguf(path)
    architecture, kind = meta.get("general.architecture"), meta.get("tokenizer.ggml.model")
    if (architecture, kind) != ("llama", "gpt2"):
        raise UserError(
            f"{path.name} is a {architecture} with a {kind} tokenizer; this conversion knows llama with gpt2"
        )
    config = llama_config(meta, tied=all(tensor.name != "output.weight" for tensor in tensors))
    _write_json(folder / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    _save_weights(tensors, config, folder)
    _save_tokenizer(meta, folder)


def llama_config(meta: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json` of a Llama model, out of GGUF metadata."""
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"]),
        "dtype": "bfloat16",
        "head_dim": meta.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": _shortest(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_theta": _shortest(meta["llama.rope.freq_base"]), "rope_type": "default"},
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _save_weights(tensors: Sequence[ReaderTensor], config: dict[str, Any], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {}
    for tensor in tensors:
        name = _tensor_name(tensor.name)
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        if name.endswith("q_proj.weight"):
            values = _original_rows(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _original_rows(values, config["num_key_value_heads"])
        weights[name] = values.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _tensor_name(name: str) -> str:
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_TENSORS and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_BLOCK_TENSORS[parts[2]]}.weight"
    raise UserError(f"the GGUF file has a tensor {name!r} that a Llama model does not have")


def _original_rows(weight: Any, heads: int) -> Any:
    """llama.cpp pairs rotary dimensions (0, 1), (2, 3) ...; transformers pairs (0, half), (1, half + 1) ..."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _save_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match meta.get("tokenizer.ggml.pre"):
        case "smollm":  # every digit by itself
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
        case "gpt-2" | "default":
            tokenizer.pre_tokenizer = byte_level
        case other:
            raise UserError(
                f"the GGUF file splits text by {other!r} before BPE; this conversion knows smollm and gpt-2"
            )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {ours: meta.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    names = {f"{name}_token": tokens[token] for name, token in found.items() if token is not None}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    fast.chat_template = meta.get("tokenizer.chat_template")
    fast.model_max_length = meta["llama.context_length"]
    fast.save_pretrained(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
