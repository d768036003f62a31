"""A Llama-architecture GGUF file turned into a folder that `from_pretrained` opens.

Steps:
1. read the header: metadata and the table of tensors (one pass; the general readers need seconds for each of three);
2. write `config.json` and `generation_config.json` from the metadata;
3. dequantise the tensors, undo llama.cpp's row order of the query and key projections, and save them in bf16;
4. rebuild the byte-level BPE tokenizer with its chat template.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import UserError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
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


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor's place in the file. `shape` is in torch order; `kind` is the ggml type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """Metadata, tensor table, and the mapped bytes."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    data: np.ndarray  # uint8, from the first tensor on

    def array(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's values in float32, dequantised."""
        from gguf import GGMLQuantizationType
        from gguf.quants import GGML_QUANT_SIZES, dequantize

        kind = GGMLQuantizationType(tensor.kind)
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(tensor.shape)) // block_values * block_bytes
        raw = self.data[tensor.offset : tensor.offset + num_bytes]
        if len(raw) != num_bytes:
            raise UserError(f"the GGUF file ends inside {tensor.name}; it was cut off: fetch it again")
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block_values * block_bytes)
        if kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        return dequantize(rows, kind).reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file of version 2 or 3. Raises UserError for anything else."""
    with open(path, "rb") as file:
        blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if blob[:4] != b"GGUF":
        raise UserError(f"{path} is not a GGUF file (its first bytes are {blob[:4]!r})")
    version, tensor_count, metadata_count = struct.unpack_from("<IQQ", blob, 4)
    if version not in (2, 3):
        raise UserError(f"{path} is GGUF version {version}; this reader knows 2 and 3")
    cursor = _Cursor(blob, 24)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    tensors = tuple(cursor.tensor() for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    return GgufFile(metadata=metadata, tensors=tensors, data=np.frombuffer(blob, np.uint8)[start:])


class _Cursor:
    def __init__(self, blob: mmap.mmap, position: int) -> None:
        self.blob, self.position = blob, position

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.blob, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        self.position += length
        return self.blob[self.position - length : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(_SCALARS[kind])

    def tensor(self) -> GgufTensor:
        name = self.string()
        shape = tuple(reversed([self.scalar("<Q") for _ in range(self.scalar("<I"))]))
        return GgufTensor(name=name, shape=shape, kind=self.scalar("<I"), offset=self.scalar("<Q"))


def convert_llama(path: Path, folder: Path) -> None:
    """Write `folder` (which exists) from a Llama-architecture GGUF file with a byte-level BPE tokenizer."""
    source = read_gguf(path)
    architecture, kind = source.metadata["general.architecture"], source.metadata["tokenizer.ggml.model"]
    if (architecture, kind) != ("llama", "gpt2"):
        raise UserError(
            f"{path.name} is a {architecture} with a {kind} tokenizer; this conversion knows llama with gpt2"
        )
    config = llama_config(source)
    _write_json(folder / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    _save_weights(source, config, folder)
    _save_tokenizer(source, folder)


def llama_config(source: GgufFile) -> dict[str, Any]:
    """`config.json` of a Llama model, out of GGUF metadata."""
    meta = source.metadata
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
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in source.tensors),
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _save_weights(source: GgufFile, config: dict[str, Any], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {}
    for tensor in source.tensors:
        name = _tensor_name(tensor.name)
        values = torch.from_numpy(np.array(source.array(tensor)))
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


def _save_tokenizer(source: GgufFile, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    meta = source.metadata
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
