"""Where a drafter's weights start: random, from the target's own top layers, or from a published drafter.

The Markov head's bias is a matrix over (previous token, next token) of rank r. Counted bigrams of the text that it will
draft give that matrix a good first value at the cost of one pass, where gradient steps would need many thousands.

d hidden size, m captured layers, V vocabulary, r rank, E distinct pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig, SettingError
from dspark.losses.micro_batch import Teacher, make_micro_batch
from dspark.models.base import Drafter
from dspark.models.checkpoint import load_drafter
from dspark.registry import algorithms

if TYPE_CHECKING:
    from dspark.decoding.target import Target

PSEUDO_COUNTS = 0.1  # of a row of bigrams
NO_START = "cannot start from this target's layers; set drafter.initial_weights=random"
PROBE_TOKENS = 256


def build_drafter(
    config: DrafterConfig,
    target: Target,
    *,
    start: str = "target",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    draft_token_ids: Tensor | None = None,
    bigrams: tuple[Tensor, Tensor] | None = None,
    match_logits: bool = False,
) -> Drafter:
    """A drafter that shares the target's embedding and head, on the target's device.

    `start` is "random", "target", or the folder of a published drafter with the same settings. `bigrams`: pairs and
    counts (`bigram_counts`) of the text to learn, from which the Markov head starts where the rest
    starts from the target; with `match_logits` the backbone then starts no louder than that head.
    Raises SettingError when the folder's drafter has other settings, or the target's layers are of another make. On
    torch's meta device all is as elsewhere, but nothing has a value.
    """
    if start in ("random", "target"):
        drafter = algorithms[config.algorithm](config)
        drafter.initialise_random(seed)
        drafter = drafter.to(target.device, dtype)
    else:
        drafter = load_drafter(Path(start), device=target.device, dtype=dtype, target=target)
        if drafter.config != config:
            pairs = {one.name: (getattr(config, one.name), getattr(drafter.config, one.name)) for one in fields(config)}
            differing = ", ".join(
                f"{name} ({theirs} there)" for name, (ours, theirs) in pairs.items() if ours != theirs
            )
            raise SettingError(
                f"the drafter in {start} has other settings: {differing} (option `drafter.initial_weights`)"
            )
    drafter.share_target(target.embed_tokens.weight, target.lm_head.weight)
    if start == "target":
        try:
            drafter.start_from_target(target)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError) as error:  # a part that the target lacks, or has in another shape
            raise SettingError(f"{target.name}: a {config.algorithm} drafter {NO_START} ({error})") from error
    if config.draft_vocab_size is not None and drafter.draft_token_ids is None:
        if draft_token_ids is None:
            raise SettingError("draft_vocab_size is set, so the draft tokens must be given")
        drafter.restrict_vocabulary(draft_token_ids)
    if start == "target" and bigrams is not None and drafter.sequential_head is not None:
        head, columns = drafter.sequential_head, config.markov_rank - config.reserves_markov_column
        initialize_from_bigrams(head.markov_w1, head.markov_w2, *bigrams, columns=columns, seed=seed)
        if match_logits:
            match_initial_logits(drafter, target, *bigrams)
    return drafter


@torch.no_grad()
def match_initial_logits(drafter: Drafter, target: Target, pairs: Tensor, counts: Tensor) -> float:
    """Scale the final norm down until the backbone's logits vary over the vocabulary no more than the head's bias.

    A copied layer that reads mask tokens says little, and says it loudly: its logits drown those of the bigrams. Both
    standard deviations are means over slots of blocks on the most frequent pairs, strung together. Gives the factor,
    at most 1.
    """
    head, count = drafter.sequential_head, min(PROBE_TOKENS // 2, len(counts))
    assert head is not None
    ids = pairs[:, counts.topk(count).indices].T.flatten().cpu()
    captured = target.capture(ids[None])
    probe = SimpleNamespace(
        sample_id="probe",
        input_ids=ids,
        spans=((1, len(ids)),),
        hidden_states=captured.hidden_states[0].cpu(),
        teacher_positions=torch.arange(len(ids)),
        teacher=Teacher(last_hidden_state=captured.last_hidden_state[0].cpu()),
    )
    anchors = torch.arange(1, len(ids) - 1, drafter.block_size).numpy()
    batch = make_micro_batch([cast(Any, probe)], [anchors], drafter.block_size).to(drafter.device)
    states, weights = drafter.block_states(batch), drafter.output_weights()
    logits = nn.functional.linear(states, weights.head)
    bias = head.bias(head.bias_vectors(states, batch.previous_ids), weights.bias)
    spread, wanted = (float(part.float().std(-1).mean()) for part in (logits, bias))
    factor = min(1.0, wanted / max(spread, 1e-12))
    drafter.norm.weight.mul_(factor)
    return factor


@torch.no_grad()
def copy_layer(layer: nn.Module, source: nn.Module, without: Collection[str] = ()) -> None:
    """Take the parts of a target's layer that have the draft layer's names and shapes."""
    theirs = source.state_dict()
    for name, tensor in layer.state_dict().items():
        if name in theirs and theirs[name].shape == tensor.shape and name not in without:
            tensor.copy_(theirs[name])


@torch.no_grad()
def scale_projections(layers: Iterable[Any], target: Target, sources: list[int]) -> None:
    """Query and key norms that the target has not, from the scale of its queries and keys."""
    if target.device.type == "meta":
        return
    scales = _projection_scales(target, sources)
    for layer, source in zip(layers, sources, strict=True):
        theirs = target.layers[source].state_dict()
        for part in ("q", "k"):
            if f"self_attn.{part}_norm.weight" not in theirs and (source, part) in scales:
                getattr(layer.self_attn, f"{part}_norm").weight.fill_(scales[source, part])


def source_layers(drafter: Any, target: Target, width: int | None = None) -> list[int]:
    """The target's top layers that are made like the draft layers (Gemma-4: full attention only).

    `width` is what the target's projections read, where the draft layer's read more.
    """
    wanted = drafter.layers[0].self_attn.q_proj.weight.shape
    if width is not None:
        wanted = torch.Size([wanted[0], width])

    def fits(layer: Any) -> bool:
        projection = getattr(getattr(layer, "self_attn", None), "q_proj", None)
        # The draft layers have a norm with a weight before the attention.
        norm = getattr(getattr(layer, "input_layernorm", None), "weight", None)
        return norm is not None and getattr(projection, "weight", torch.empty(0)).shape == wanted

    fitting = [index for index, layer in enumerate(target.layers) if fits(layer)]
    count = len(drafter.layers)
    if len(fitting) < count:
        fewer = f", or drafter.num_draft_layers={len(fitting)}" if fitting else ""
        raise SettingError(
            f"{target.name}: {len(fitting)} of its layers are made as the {count} draft layers are (a norm with a "
            f"weight, then queries from a projection of shape {tuple(wanted)}): a drafter {NO_START}{fewer}"
        )
    return fitting[-count:]


def _probe(target: Target) -> Tensor:
    """A fixed spread of token ids: scales of queries and keys hardly depend on the text."""
    count = min(256, getattr(target.text_config, "max_position_embeddings", 256))
    return (torch.arange(count) * 7919 % target.vocab_size)[None]


def _projection_scales(target: Target, layers: list[int]) -> dict[tuple[int, str], float]:
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
        target.capture(_probe(target))
    finally:
        for handle in handles:
            handle.remove()
    return found


def bigram_counts(previous_ids: Tensor, next_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Distinct pairs [2, E] of (previous, next) token, ascending, and how often each occurs [E]."""
    pairs, counts = torch.unique(previous_ids * vocab_size + next_ids, return_counts=True)
    return torch.stack([pairs // vocab_size, pairs % vocab_size]), counts


def unigram(pairs: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """The share [V] of each token among next tokens, with one pseudo-count for each token that occurs at all."""
    total = torch.zeros(vocab_size, dtype=torch.float64).index_add_(0, pairs[1], counts.double())
    occurs = total > 0
    return (total + occurs) / (total + occurs).sum()


def association(pairs: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    """log(1 + n(x, y) / (c p(y))) for each pair [E], with `share` p(y) [V] and c pseudo-counts a row, spread like p.

    Up to a constant of the row x this is log(p(y | x) / p(y)): a softmax does not see the constant, and pairs that
    never occur have the value 0, so the matrix is sparse.
    """
    return torch.log1p(counts.double() / (PSEUDO_COUNTS * share[pairs[1]]))


@torch.no_grad()
def initialize_from_bigrams(
    w1: nn.Embedding, w2: nn.Linear, pairs: Tensor, counts: Tensor, *, columns: int, seed: int = 0
) -> None:
    """Set the first `columns` of W1 [V, r] and W2 [V, r] so that the head's bias is log p(next | previous), nearly.

    The first column carries log p(next) (1 in W1), the others the best approximation of `association`, with rows
    weighted by the square root of how often their token precedes another: rank is spent where text is. Tokens that
    occur in no pair get zeros in W2 and stay as they are in W1. W1 and W2 share the scale evenly.
    """
    vocab_size = w1.weight.shape[0]
    share = unigram(pairs, counts, vocab_size)
    values = association(pairs, counts, share)
    rows, row_of = torch.unique(pairs[0], return_inverse=True)
    names, name_of = torch.unique(pairs[1], return_inverse=True)
    weight = torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_of, counts.double()).sqrt()
    matrix = torch.sparse_coo_tensor(
        torch.stack([row_of, name_of]), (values * weight[row_of]).float(), (len(rows), len(names))
    ).coalesce()
    kept = min(columns - 1, *matrix.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(matrix, q=kept, niter=4)
    left, right = u * s.sqrt() / weight.float()[:, None], v * s.sqrt()
    even = (right.pow(2).mean() / left.pow(2).mean().clamp(min=1e-12)).pow(0.25)
    first = torch.zeros(len(rows), columns)
    first[:, 0] = 1.0
    first[:, 1 : kept + 1] = left * even
    second = torch.zeros(len(names), columns)
    second[:, 1 : kept + 1] = right / even
    logs = share[names].log().float()
    second[:, 0] = logs - logs.mean()
    w1.weight[:, 0] = 1.0
    w1.weight[rows.to(w1.weight.device), :columns] = first.to(w1.weight)
    w2.weight[:, :columns] = 0.0
    w2.weight[names.to(w2.weight.device), :columns] = second.to(w2.weight)
