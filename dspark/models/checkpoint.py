"""A drafter's folder: `config.json` and `model.safetensors`, compared with its manifest and with each other.

No size that the configuration declares is believed before the header of the weights holds it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.config import DrafterConfig, SettingError
from dspark.manifest import AGAIN, CheckpointError, read_json, require_intact
from dspark.models.base import Drafter
from dspark.models.draft_vocabulary import engine_mapping, mapped_tokens
from dspark.models.heads import OUTSIDE_BIAS
from dspark.models.merged_projection import context_projection
from dspark.registry import algorithms

CONFIG, WEIGHTS = "config.json", "model.safetensors"
SHARED_TENSORS = {"embed_tokens.weight", "lm_head.weight"}
MAPPING_TENSORS = ("d2t", "t2d")  # of a reduced draft vocabulary that no Markov column carries


def save_drafter(drafter: Drafter, path: str | Path, target_text_config: Any, *, with_shared: bool = True) -> None:
    """Write `config.json` and `model.safetensors` in the native layout; the manifest is `new_folder`'s.

    `with_shared` False leaves out the target's embedding and head; such a folder opens only with its target.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = native_tensors(drafter, with_shared=with_shared)
    save_tensors(tensors, folder / WEIGHTS)
    values = drafter.config.to_checkpoint(target_text_config)
    values["dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def native_tensors(drafter: Drafter, *, with_shared: bool = True) -> dict[str, Tensor]:
    """The weights as the native layout stores them, by name: contiguous copies on the CPU."""
    if drafter.markov_head is not None:
        drafter.markov_head.restore_reserved_column()
    # Copies: a tied target's embedding and head are one tensor in memory and two in the file.
    tensors = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in drafter.state_dict().items()
        if with_shared or name not in SHARED_TENSORS
    }
    tensors["fc.weight"] = context_projection(drafter).to("cpu").contiguous()
    config = drafter.config
    if drafter.draft_token_ids is not None and not config.reserves_markov_column:
        tensors["d2t"], tensors["t2d"] = engine_mapping(drafter.draft_token_ids, config.vocab_size)
    return tensors


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file that others may read as they may read files beside it."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # safetensors leaves it to its owner alone


def read_config(folder: str | Path, *, needs_manifest: bool = False, cure: str = AGAIN) -> DrafterConfig:
    """The configuration in a drafter's folder, once its weights are known to fit it; no weight is read.

    Raises CheckpointError for a folder that was changed, is no drafter's, or declares what its weights don't hold.
    """
    place = Path(folder).expanduser()
    return _checked_config(place, _shapes(place, needs_manifest, cure), (), cure)


def load_drafter(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    target: Any = None,
    needs_manifest: bool = False,
    cure: str = AGAIN,
) -> Drafter:
    """Open a published checkpoint by the `architectures` of its config.json.

    Args:
        dtype: None keeps the stored one.
        target: supplies embedding and head where the folder leaves them out.
        needs_manifest: refuse a folder without one, which is what our own never lack.
        cure: what to do about a folder that cannot be used, for the message.

    Raises:
        CheckpointError: a file is missing or was changed, the architecture is unknown, a layout key is missing, or the
            tensors don't fit the configuration.
    """
    folder = Path(path).expanduser()
    shapes = _shapes(folder, needs_manifest, cure)
    config = _checked_config(folder, shapes, None if target is None else tuple(target.embed_tokens.weight.shape), cure)
    try:
        tensors = load_file(folder / WEIGHTS, device=str(device))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read ({error}): {cure}") from error
    mapping = {name: tensors.pop(name) for name in MAPPING_TENSORS if name in tensors}
    if whole := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        raise CheckpointError(f"{folder / WEIGHTS}: {', '.join(whole[:8])} holds no floating-point numbers: {cure}")
    if target is not None:
        tensors.setdefault("embed_tokens.weight", target.embed_tokens.weight.detach())
        tensors.setdefault("lm_head.weight", target.lm_head.weight.detach())
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tensors = {name: tensor.to(device=device, dtype=chosen or tensor.dtype) for name, tensor in tensors.items()}
    with torch.device("meta"):
        drafter = algorithms[config.algorithm](config)
    drafter.load_state_dict(tensors, assign=True)
    drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(False)
    try:
        if config.reserves_markov_column and drafter.markov_head is not None:
            inside = drafter.markov_head.markov_w2.weight[:, -1] > OUTSIDE_BIAS / 2
            drafter.restrict_vocabulary(inside.nonzero().flatten())
        elif config.draft_vocab_size is not None:
            drafter.restrict_vocabulary(mapped_tokens(mapping, config.vocab_size))
    except SettingError as error:
        raise CheckpointError(f"{folder / WEIGHTS}: {error}: {cure}") from error
    return drafter.eval()


def _shapes(folder: Path, needs_manifest: bool, cure: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors by name, out of the file's header, once the folder is known to be intact."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}; a drafter's folder holds {CONFIG} and {WEIGHTS}: {cure}")
    require_intact(folder, (CONFIG, WEIGHTS), needs_manifest=needs_manifest, cure=cure)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is cut off or damaged ({error}): {cure}") from error


def _checked_config(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], shared: tuple[int, ...] | None, cure: str
) -> DrafterConfig:
    """The configuration, once the stored `shapes` are what it says.

    shared: [V, d] of embedding and head, for a folder that leaves them out; () takes the configuration's word for it.
    """
    values = read_json(folder / CONFIG, cure)
    try:
        config = DrafterConfig.from_checkpoint(values)
        if shared is not None:
            shapes = dict.fromkeys(SHARED_TENSORS, shared) | dict(shapes)
        _require_sizes(config, shapes)
        if shared == ():
            shapes = dict.fromkeys(SHARED_TENSORS, (config.vocab_size, config.hidden_size)) | dict(shapes)
        with torch.device("meta"):
            expected = {
                name: tuple(value.shape) for name, value in algorithms[config.algorithm](config).state_dict().items()
            }
    except SettingError as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}: {cure}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} describes no drafter ({type(error).__name__}: {error}): {cure}"
        ) from error
    if config.draft_vocab_size is not None and not config.reserves_markov_column:
        expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - shapes.keys())]
    problems += [f"{name} is not part of this drafter" for name in sorted(shapes.keys() - expected.keys())]
    problems += [
        f"{name} is {shapes[name]}, {CONFIG} says {expected[name]}"
        for name in sorted(expected.keys() & shapes.keys())
        if shapes[name] != expected[name]
    ]
    if problems:
        hint = " (pass `target=` for a folder without them)" if SHARED_TENSORS & expected.keys() - shapes.keys() else ""
        raise CheckpointError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {'; '.join(problems[:8])}{hint}: {cure}")
    return config


def _require_sizes(config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises SettingError for a size that no stored tensor has, before anything of that size is made."""
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    if config.num_draft_layers > len(layers):
        raise SettingError(f"num_hidden_layers is {config.num_draft_layers}, and {WEIGHTS} has {len(layers)} layers")
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads * config.head_dim,
        "num_key_value_heads": config.num_key_value_heads * config.head_dim,
        "markov_rank": config.markov_rank,
        "target_layer_ids": config.hidden_states_size,
    }
    for name, size in sizes.items():
        if size > longest:
            raise SettingError(f"{name} makes a tensor {size} wide, and the longest in {WEIGHTS} has {longest}")
