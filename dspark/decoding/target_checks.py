"""What a target must have: found out from its config and its files' headers, and by a short comparison once it is open.

S sequence, d hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dspark.decoding.kv_cache import RaggedCache, RaggedStep, ragged_forward
from dspark.errors import DsparkError

PARTS = ("layers", "norm", "embed_tokens")


class TargetError(DsparkError):
    """The target cannot be opened or read the way this pipeline needs."""


def text_decoder(model: Any) -> Any:
    """The decoder of a causal language model. Raises TargetError for one of another make."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
    decoder = getattr(decoder, "language_model", decoder)
    missing = [part for part in PARTS if not hasattr(decoder, part)]
    if missing:
        raise TargetError(
            f"{type(model).__name__} has no {', '.join(missing)}: a decoder with `layers`, `norm` and `embed_tokens` "
            "is needed, as Llama, Mistral, Qwen2, Qwen3, SmolLM, Gemma and their kin have it; GPT-2, OPT, GPT-NeoX, "
            "Phi-1 and Phi-2, Mamba and encoder-decoder models do not work (option `target.model`)"
        )
    return decoder


def output_head(model: Any) -> nn.Linear:
    """The model's output embedding. Raises TargetError for one that is more than a weight [V, d]."""
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is None or getattr(head, "bias", None) is not None:
        what = "has no output embedding" if head is None else "has an output head with a bias"
        raise TargetError(
            f"{type(model).__name__} {what}: training, codecs and servers read the head as one weight (option "
            "`target.model`)"
        )
    return head


def require_decoder(config: Any, name: str, attention: str = "eager") -> Any:
    """A model of this config on torch's meta device, where it takes no memory.

    Raises TargetError when it is no decoder that can be read, or lacks that attention.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    except (ImportError, ValueError) as error:
        raise opening_error(name, attention, error) from error
    text_decoder(model)
    output_head(model)
    return model


def opening_error(name: str, attention: str, error: Exception) -> TargetError:
    """What to tell the user when transformers cannot make or load the target."""
    text = str(error)
    if isinstance(error, ImportError) and "Flash" in text:
        return TargetError(
            f"target.attn_implementation is {attention}, but the package flash-attn is not installed here; "
            "install it, or set target.attn_implementation=sdpa"
        )
    if "does not support" in text and "ttention" in text:
        return TargetError(
            f"the target {name!r} ({text.partition(' ')[0]}) does not support target.attn_implementation={attention}; "
            "set target.attn_implementation=eager"
        )
    if "Unrecognized configuration class" in text:
        kind = text.partition("<class '")[2].partition("'")[0].rpartition(".")[2]
        return TargetError(f"the target {name!r} ({kind}) is no causal language model (option `target.model`)")
    return TargetError(f"cannot open the target {name!r} (option `target.model`): {error}")


def require_device(device: str) -> None:
    """Raises TargetError for a GPU that this process does not have; `auto` and `cpu` always do."""
    if not device.startswith("cuda"):
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= count:
        raise TargetError(
            f"target.device is {device}, and torch {torch.__version__} finds {count} GPUs here; set target.device=auto "
            "or cpu, give each worker a GPU (cluster.gpus_per_worker), or install a torch built for CUDA"
        )


def require_whole_weights(folder: Path) -> None:
    """Raises TargetError for a safetensors file that is missing, cut short or otherwise unreadable; reads headers."""
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    for file in sorted({*folder.glob("*.safetensors"), *(folder / name for name in named)}):
        if not file.is_file():
            raise TargetError(f"{file} is missing, but {index.name} names it; fetch the target again")
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise TargetError(
                f"{file} ({file.stat().st_size:,} bytes) is cut short or damaged ({error}); fetch the target again"
            ) from error


def unknown_token(target: Any, ids: Iterable[int]) -> str | None:
    """What is wrong with a text that holds ids of no token, a drafter's mask often among them; None when nothing is."""
    size = target.input_vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is None:
        return None
    return f"{wrong} is the id of no token: ids are 0 to {size - 1} (the target has {target.vocab_size} logits)"


_SHORT, _LONG = 9, 41  # prompts of the comparison; answers of ANSWER tokens follow
_ANSWER = 8
# Each round: (new tokens, those kept) of the short row and of the long one; what is not kept is a wrong draft.
_ROUNDS = (((4, 2), (2, 2)), ((1, 1), (4, 1)), ((3, 3), (3, 3)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Mean relative difference of states over tokens, ||ours - own|| / ||own||, and what rounding may account for."""

    head: float
    captured: float
    batched: float
    decoded: float
    allowed: float


def check_identity(target: Any) -> dict[str, Any]:
    """All that the result of `check_target` depends on, beside the target's files."""
    sources = [
        Path(file).read_bytes() for file in (inspect.getfile(type(target)), inspect.getfile(RaggedCache), __file__)
    ]
    return {
        "config_sha256": hashlib.sha256(target.text_config.to_json_string(use_diff=False).encode()).hexdigest(),
        "target_layer_ids": list(target.layer_ids),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "attn_implementation": target.text_config._attn_implementation,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code_sha256": hashlib.sha256(b"".join(sources)).hexdigest(),
    }


@torch.inference_mode()
def check_target(target: Any) -> Comparison:
    """Compare how a `Target` is read and decoded with here with its model's plain forward pass over one row.

    Head times last hidden state with the logits; captured hidden states with the model's own; a short row beside a
    long one with each alone; and three rounds of verification of both rows, rejected drafts among them, with the plain
    pass over the text that was kept. Raises TargetError with what differs by more than rounding in the target's dtype:
    8 machine epsilons (1e-4 at least), or 5 times what the model's own states change by when later tokens are cut off.
    """
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(target.input_vocab_size, (size + _ANSWER,), generator=generator) for size in (_SHORT, _LONG)]
    with _naming(target, "the states of its plain forward pass"):
        plain = [_plain(target, text) for text in texts]
        shorter = _plain(target, texts[1][:_LONG])
    least = max(1e-4, 8 * torch.finfo(target.dtype).eps)
    rounding = _difference(shorter[0], plain[1][0][:_LONG])
    if rounding > 5 * least:
        raise TargetError(f"{target.name}: a state depends on the tokens after it ({rounding:.2g}): no causal model")
    allowed = max(least, 5 * rounding)
    found = {}
    for part, (what, compare) in _COMPARISONS.items():
        with _naming(target, what):
            found[part] = max(_difference(ours, own) for ours, own in compare(target, texts, plain))
        if not found[part] <= allowed:
            raise TargetError(
                f"{target.name}: {what} differ from the model's own by {found[part]:.2g} (relative; allowed "
                f"{allowed:.2g}): the model does something that is not supported here (option `target.model`)"
            )
    return Comparison(**found, allowed=allowed)


@contextmanager
def _naming(target: Any, what: str) -> Iterator[None]:
    """Turn what a model that is read in the wrong way may end in into a TargetError."""
    try:
        yield
    except (TargetError, torch.OutOfMemoryError):
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise TargetError(
            f"{target.name}: {what} cannot be had: {_in_plain_words(error)} (option `target.model`; docs/targets.md "
            "lists the families that work)"
        ) from error


def _in_plain_words(error: Exception) -> str:
    """What a model does that our mask and our cache of keys and values do not serve; else the error's own text."""
    text = str(error)
    if "RaggedMask" in text:
        return "it reads its attention mask outside its attention function, which is not supported"
    if "RaggedLayer" in text or "RaggedCache" in text:
        return "it keeps states besides keys and values (linear attention, convolutions), which are not supported"
    return text


def _plain(target: Any, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(states after the final norm [S, d], captured hidden states [S, m*d], logits [S, V]) of the model alone."""
    output = target.model(input_ids=text[None].to(target.device), use_cache=False, output_hidden_states=True)
    states = output.hidden_states
    if states is None or len(states) != target.num_layers + 1 or any(state.dim() != 3 for state in states):
        raise TargetError(f"{target.name}: it gives no hidden state a token for each of its {target.num_layers} layers")
    last = target.num_layers - 1  # whose output the model gives only after the norm, as that of one layer more
    layers = [states[min(layer, last) + 1] for layer in target.layer_ids if layer != last] or [states[0][..., :0]]
    found = states[-1][0], torch.cat(layers, -1)[0], output.logits[0]
    if not all(bool(part.isfinite().all()) for part in found):
        raise TargetError(f"{target.name}: its own states are not finite in {target.dtype} (option `target.dtype`)")
    return found


def _difference(ours: Tensor, own: Tensor) -> float:
    """Mean over tokens of ||ours - own|| / ||own||, [S, d] each."""
    ours, own = ours.double(), own.double()
    return float(((ours - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-9)).mean())


Pairs = Iterator[tuple[Tensor, Tensor]]


def _head(target: Any, _texts: list[Tensor], plain: list[Any]) -> Pairs:
    for last, _, logits in plain:
        yield target.logits(last), logits


def _captured(target: Any, texts: list[Tensor], plain: list[Any]) -> Pairs:
    for text, own in zip(texts, plain, strict=True):
        captured = target.capture(text[None])
        yield captured.last_hidden_state[0], own[0]
        yield captured.hidden_states[0, :, : own[1].shape[1]], own[1]


def _batched(target: Any, texts: list[Tensor], plain: list[Any]) -> Pairs:
    rows = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    captured = target.capture(rows, mask)
    for index, (text, own) in enumerate(zip(texts, plain, strict=True)):
        yield captured.last_hidden_state[index, : len(text)], own[0]


def _decoded(target: Any, texts: list[Tensor], plain: list[Any]) -> Pairs:
    cache = RaggedCache(target.num_layers, 2, _LONG + _ANSWER + 1)

    def forward(rows: list[int], starts: list[int], tokens: list[Tensor]) -> list[Tensor]:
        step = RaggedStep(rows, starts, [len(new) for new in tokens], target.device)
        last, _ = ragged_forward(target, cache, step, torch.cat(tokens).to(target.device))
        return list(last.split(step.counts))

    lengths = [_SHORT, _LONG]
    prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    kept = [[states] for states in forward([0, 1], [0, 0], prompts)]
    for counts in _ROUNDS:
        new = []
        for text, start, (count, right) in zip(texts, lengths, counts, strict=True):
            wrong = (text[start + right : start + count] + 1) % target.input_vocab_size
            new.append(torch.cat([text[start : start + right], wrong]))
        for row, outputs in enumerate(forward([0, 1], lengths, new)):
            right = counts[row][1]
            kept[row].append(outputs[:right])
            lengths[row] += right
    cache.move_row(1, 0, lengths[1])  # the short row has ended, and the long one takes its place
    kept[1] += forward([0], lengths[1:], [texts[1][lengths[1] : lengths[1] + 1]])
    for row, states in enumerate(kept):
        ours = torch.cat(states)
        yield ours, plain[row][0][: len(ours)]


_COMPARISONS = {
    "head": ("the head times the last hidden states", _head),
    "captured": ("captured hidden states", _captured),
    "batched": ("states of a short row beside a long one", _batched),
    "decoded": ("states of decoding with drafts", _decoded),
}
