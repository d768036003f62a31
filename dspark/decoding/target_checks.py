"""What a target must have, found out from its config and its files' headers, before any weight is loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

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
            "Mamba and encoder-decoder models do not work (option `target.model`)"
        )
    return decoder


def require_decoder(config: Any, name: str, attention: str = "eager") -> None:
    """Raises TargetError when a model of this config is no decoder that can be read, or lacks that attention.

    The model is made on torch's meta device, where it takes no memory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    except (ImportError, ValueError) as error:
        raise opening_error(name, attention, error) from error
    text_decoder(model)


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
    import torch

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
    from safetensors import SafetensorError, safe_open

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
