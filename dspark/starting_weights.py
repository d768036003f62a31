"""Where a drafter's weights start: random, from the target's own top layers, or from a published drafter.

d hidden size, m captured layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.bigrams import initialize_from_bigrams
from dspark.checkpoint import drafter_class, load_drafter
from dspark.config import DrafterConfig, SettingError
from dspark.decoding.target import Target
from dspark.drafter import Drafter


def build_drafter(
    config: DrafterConfig,
    target: Target,
    *,
    start: str = "target",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    draft_token_ids: Tensor | None = None,
    bigrams: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """A drafter that shares the target's embedding and head, on the target's device.

    `start` is "random", "target", or the folder of a published drafter with the same settings. `bigrams`: pairs and
    counts (`dspark.bigrams.bigram_counts`) of the text to learn, from which the Markov head starts where the rest
    starts from the target.
    Raises SettingError when the folder's drafter has other settings.
    """
    if start in ("random", "target"):
        drafter = drafter_class(config)(config)
        drafter.initialise_random(seed)
        drafter = drafter.to(target.device, dtype)
    else:
        drafter = load_drafter(Path(start), device=target.device, dtype=dtype, target=target)
        # Anchors a sequence and the like are the training's affair.
        if drafter.config.replace(num_anchors=config.num_anchors) != config:
            ours, theirs = vars(config), vars(drafter.config)
            differing = ", ".join(f"{key} ({theirs[key]} there)" for key in ours if ours[key] != theirs[key])
            raise SettingError(
                f"the drafter in {start} has other settings: {differing} (option `drafter.initial_weights`)"
            )
    drafter.share_target(target.embed_tokens.weight, target.lm_head.weight)
    if start == "target":
        (initialize_from_target if isinstance(drafter, Drafter) else initialize_eagle3_from_target)(drafter, target)
    if config.draft_vocab_size is not None and drafter.draft_token_ids is None:
        if draft_token_ids is None:
            raise SettingError("draft_vocab_size is set, so the draft tokens must be given")
        drafter.restrict_vocabulary(draft_token_ids)
    if start == "target" and bigrams is not None and drafter.sequential_head is not None:
        head, columns = drafter.sequential_head, config.markov_rank - config.reserves_markov_column
        initialize_from_bigrams(head.markov_w1, head.markov_w2, *bigrams, columns=columns, seed=seed)
    return drafter


@torch.no_grad()
def initialize_from_target(drafter: Drafter, target: Target, probe_ids: Tensor | None = None) -> list[int]:
    """Start the draft layers as the target's top layers, reading the last captured layer; gives their ids.

    fc is the identity on the last captured layer. One norm serves the context of every draft layer, so each layer's
    own input norm is folded into its projections, relative to the first's: keys and values of the context are then
    what the target's layer would make of that state. Parts that the family's block has and the target's has not
    (query and key norms on Llama) are set from the root mean square that the target's own queries and keys have on
    `probe_ids` [B, S]; parts of another shape stay as they are.
    """
    config = drafter.config
    sources = _source_layers(drafter, target)
    last = config.target_layer_ids.index(max(config.target_layer_ids))
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, last * config.hidden_size : (last + 1) * config.hidden_size].fill_diagonal_(1.0)
    _copy(drafter.norm.weight, target.final_norm.weight)
    first_norm = target.layers[sources[0]].input_layernorm.weight.float()
    shared_norm = torch.where(first_norm.abs() < 1e-3, torch.full_like(first_norm, 1e-3), first_norm)
    _copy(drafter.hidden_norm.weight, shared_norm)
    scales = _projection_scales(target, sources, _probe(target) if probe_ids is None else probe_ids)
    for layer, source_id in zip(drafter.layers, sources, strict=True):
        source = target.layers[source_id]
        theirs = source.state_dict()
        for name, tensor in layer.state_dict().items():
            if name in theirs and theirs[name].shape == tensor.shape:
                tensor.copy_(theirs[name])
        ratio = source.input_layernorm.weight.float() / shared_norm
        _copy(layer.input_layernorm.weight, shared_norm)
        for part in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, part)
            if projection is not None:
                projection.weight.mul_(ratio.to(projection.weight))
        for part in ("q", "k"):
            if f"self_attn.{part}_norm.weight" not in theirs and (source_id, part) in scales:
                getattr(layer.self_attn, f"{part}_norm").weight.fill_(scales[source_id, part])
    return sources


@torch.no_grad()
def initialize_eagle3_from_target(drafter: Any, target: Target, probe_ids: Tensor | None = None) -> list[int]:
    """Start EAGLE-3's layer as the target's top layer, reading the last captured layer; gives that layer's id.

    The layer's attention reads the next token's embedding beside the state: the state's half of its projections and
    the norm before it are the target's, the embedding's half stays random. fc is the identity on the last captured
    layer; MLP and final norm are the target's.
    """
    config, layer = drafter.config, drafter.layers[0]
    size = config.hidden_size
    (source_id,) = _source_layers(drafter, target, width=size)
    source = target.layers[source_id]
    last = config.target_layer_ids.index(max(config.target_layer_ids))
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, last * size : (last + 1) * size].fill_diagonal_(1.0)
    _copy(drafter.norm.weight, target.final_norm.weight)
    _copy(layer.hidden_norm.weight, source.input_layernorm.weight)
    theirs = source.state_dict()
    for name, tensor in layer.state_dict().items():
        if name in theirs and theirs[name].shape == tensor.shape and name != "input_layernorm.weight":
            _copy(tensor, theirs[name])
    scales = _projection_scales(target, [source_id], _probe(target) if probe_ids is None else probe_ids)
    for part in ("q", "k", "v"):
        projection = getattr(source.self_attn, f"{part}_proj", None)
        if projection is not None:
            getattr(layer.self_attn, f"{part}_proj").weight[:, size:].copy_(projection.weight)
    for part in ("q", "k"):
        if f"self_attn.{part}_norm.weight" not in theirs and (source_id, part) in scales:
            getattr(layer.self_attn, f"{part}_norm").weight.fill_(scales[source_id, part])
    return [source_id]


def _source_layers(drafter: Any, target: Target, width: int | None = None) -> list[int]:
    """The target's top layers whose attention has the draft layers' shapes (Gemma-4: full attention only).

    `width` is what the target's projections read, where the draft layer's read more.
    """
    wanted = drafter.layers[0].self_attn.q_proj.weight.shape
    if width is not None:
        wanted = torch.Size([wanted[0], width])
    fitting = [
        index
        for index, layer in enumerate(target.layers)
        if getattr(getattr(getattr(layer, "self_attn", None), "q_proj", None), "weight", torch.empty(0)).shape == wanted
    ]
    count = len(drafter.layers)
    if len(fitting) < count:
        raise SettingError(
            f"{target.name} has {len(fitting)} layers of the draft layers' shape, {count} are wanted; "
            "set `drafter.initial_weights` to random"
        )
    return fitting[-count:]


def _probe(target: Target) -> Tensor:
    """A fixed spread of token ids: scales of queries and keys hardly depend on the text."""
    count = min(256, getattr(target.text_config, "max_position_embeddings", 256))
    return (torch.arange(count) * 7919 % target.vocab_size)[None]


def _projection_scales(target: Target, layers: list[int], probe_ids: Tensor) -> dict[tuple[int, str], float]:
    """Root mean square of the outputs of q_proj and k_proj, {(layer, "q" or "k"): value}."""
    found: dict[tuple[int, str], float] = {}

    def keep(key: tuple[int, str]) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            # The first token's keys are outliers in many models; the median over positions ignores it.
            found[key] = float(output.float().pow(2).mean(-1).median().sqrt())

        return hook

    handles = [
        projection.register_forward_hook(keep((layer, part)))
        for layer in layers
        for part in ("q", "k")
        if (projection := getattr(target.layers[layer].self_attn, f"{part}_proj", None)) is not None
    ]
    try:
        target.capture(probe_ids)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _copy(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter))
