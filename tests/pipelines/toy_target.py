"""A two-layer Llama with random weights, as a GGUF file: small enough to run a stage on in seconds."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96


def write_gguf(path: Path, *, tied: bool, pre: str = "gpt-2") -> None:
    """A random two-layer Llama with a byte-level vocabulary, a few merges and two control tokens."""
    random = np.random.default_rng(0)
    tokens = ["<|end|>", "<|start|>", "<|unused|>", *bytes_to_unicode().values(), "ab", "Ġc", "ĠĠ"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("toy")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ġ c", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")

    def add(name: str, *shape: int, kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0) -> None:
        values = random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", HIDDEN)
        add(block + "attn_q.weight", HIDDEN, HIDDEN, kind=GGMLQuantizationType.Q4_1)
        add(block + "attn_k.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN)
        add(block + "attn_v.weight", HIDDEN // HEADS * KV_HEADS, HIDDEN, kind=GGMLQuantizationType.F16)
        add(block + "attn_output.weight", HIDDEN, HIDDEN)
        add(block + "ffn_norm.weight", HIDDEN)
        add(block + "ffn_gate.weight", INNER, HIDDEN)
        add(block + "ffn_up.weight", INNER, HIDDEN)
        add(block + "ffn_down.weight", HIDDEN, INNER, kind=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
