"""What is trained: the drafter with its starting weights, and its parameters in groups for the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from dspark.decoding.target import Target
from dspark.decoding.target_checks import require_decoder
from dspark.decoding.target_tail import TargetTail
from dspark.losses.fused_loss import BlockLoss
from dspark.losses.micro_batch import Teacher
from dspark.losses.output_head import log_normalizers
from dspark.models.draft_vocabulary import most_frequent_tokens
from dspark.models.merged_projection import merge_projection
from dspark.models.starting_weights import bigram_counts, build_drafter
from pipelines.training.task import TrainingTask, drafter_config
from pipelines.workers import open_target
from storage.cache.target_cache import TargetCache

if TYPE_CHECKING:
    from dspark.models.base import Drafter
    from pipelines.settings import Settings
    from pipelines.settings.schema import TrainSettings
    from pipelines.target_spec import TargetSpec

BIGRAM_ROWS = 20_000  # rows whose token statistics choose the draft vocabulary and start the Markov head


def make_drafter(task: TrainingTask, cache: TargetCache) -> Drafter:
    """The drafter that the settings ask for, with its starting weights."""
    settings = task.settings
    config = drafter_config(settings, task.spec)
    target = open_target(settings, task.spec)
    previous, following = _supervised_pairs(cache)
    drafted = None
    if config.draft_vocab_size is not None:
        counts = torch.bincount(following, minlength=config.vocab_size)
        drafted = most_frequent_tokens(counts, config.draft_vocab_size, always=task.spec.stop_token_ids)
    drafter = build_drafter(
        config,
        target,
        start=settings.drafter.initial_weights,
        seed=settings.run.seed,
        draft_token_ids=drafted,
        bigrams=bigram_counts(previous, following, config.vocab_size),
        match_logits=settings.drafter.match_initial_logits,
    )
    if cache.projection is not None and cache.unprojection is not None:
        merge_projection(drafter, cache.projection, cache.unprojection)
    return drafter


def require_drafter(settings: Settings, spec: TargetSpec) -> None:
    """Raises SettingError for a drafter that this target cannot have, or that cannot start from it; reads no weight."""
    config = replace(drafter_config(settings, spec), draft_vocab_size=None)  # the tokens are counted later
    if settings.drafter.initial_weights != "target" or settings.target.trust_remote_code:
        return
    model = require_decoder(AutoConfig.from_pretrained(spec.path), spec.name)
    with torch.device("meta"):
        build_drafter(config, Target(model, target_layer_ids=spec.target_layer_ids, name=spec.name))


def upper_layers(task: TrainingTask, cache: TargetCache) -> Callable[[Tensor], Tensor] | None:
    """The target's layers above the last captured one, for a cache whose teacher is recomputed; else None."""
    if cache.codecs.teacher is None or cache.codecs.teacher.name != "recomputed":
        return None
    return TargetTail(open_target(task.settings, task.spec))


def teacher_normalizers(module: BlockLoss) -> Callable[[Teacher], Tensor] | None:
    """The teacher's normaliser over the whole vocabulary, worth remembering where the drafter's is smaller.

    On a CPU only: elsewhere the loader would compete with it for what the device does at once.
    """
    if module.drafter.draft_token_ids is None or module.drafter.device.type != "cpu":
        return None
    return partial(log_normalizers, head=module.head)


def speed_up(drafter: Drafter, settings: TrainSettings) -> None:
    """Gradient checkpointing and torch.compile, as asked for.

    What is compiled is a layer's feed-forward part and its norms, whose kernels it fuses; attention has kernels of its
    own. Parameter names stay.
    """
    if settings.gradient_checkpointing:
        drafter.gradient_checkpointing = True
    if settings.torch_compile:
        for name, part in drafter.layers.named_modules():
            if name.endswith(("mlp", "layernorm")):
                part.compile(dynamic=True)


def parameter_groups(module: BlockLoss, layer_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups whose learning rate falls by `layer_decay` a layer from the heads down to the projection `fc`.

    A warm start keeps what the lower layers know: they move least. 1 is one learning rate for all. What no gradient
    reaches takes no weight decay either: parameters with a constant column, and a confidence head without its loss.
    """
    drafter = module.drafter
    depth = len(drafter.layers) + 1
    still = {id(parameter) for parameter in (drafter.markov_head.partly_constant if drafter.markov_head else ())}
    if drafter.confidence_head is not None and "confidence_logits" not in module.config.reads:
        still |= {id(parameter) for parameter in drafter.confidence_head.parameters()}
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in drafter.named_parameters():
        part, *rest = name.split(".")
        level = int(rest[0]) + 1 if part == "layers" else 0 if part in ("fc", "hidden_norm") else depth
        groups.setdefault((0 if layer_decay == 1 else depth - level, id(parameter) in still), []).append(parameter)
    return [
        {"params": members, "lr_scale": layer_decay**below, **({"weight_decay": 0.0} if constant else {})}
        for (below, constant), members in sorted(groups.items(), key=lambda item: item[0])
    ]


def _supervised_pairs(cache: TargetCache) -> tuple[Tensor, Tensor]:
    """Every supervised token of the cache with the token before it: two tensors [E]."""
    previous, following = [], []
    for index in range(min(len(cache), BIGRAM_ROWS)):
        token_ids, spans = cache.tokens(index)
        ids = torch.from_numpy(token_ids.astype("int64"))
        for start, end in spans:
            first = max(start, 1)
            previous.append(ids[first - 1 : end - 1])
            following.append(ids[first:end])
    return torch.cat(previous), torch.cat(following)
