"""The settings of the drafter's parts and of its loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelines.section import NonNegative, Positive, Section

Algorithm = Literal["dspark", "dflash", "eagle3"]


class DrafterSettings(Section):
    """The drafter's parts. What is null is taken from the target; what an algorithm sets, `pipelines.recipes` says."""

    algorithm: Algorithm = "dspark"
    num_draft_layers: Positive = 5
    block_size: Annotated[int, Field(ge=1, le=64)] = 7  # draft tokens a round; eagle3: unrolled steps
    block_layout: Literal["anchor-first", "mask-first"] = "anchor-first"
    target_layer_ids: tuple[Annotated[int, Field(ge=-1)], ...] | None = None  # captured; null: the paper's spread
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    markov_rank: Annotated[int, Field(ge=0)] = 256  # 0: no sequential head
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    draft_vocab_size: Positive | None = None  # null: the target's whole vocabulary
    initial_weights: str = Field(default="target", min_length=1)  # random, target, or a published drafter's folder

    @property
    def has_confidence_head(self) -> bool:
        return self.algorithm == "dspark" and self.enable_confidence_head

    @model_validator(mode="after")
    def _layers_rise(self) -> DrafterSettings:
        layers = self.target_layer_ids
        if layers is not None and (not layers or list(layers) != sorted(set(layers))):
            rising = f" {sorted(set(layers))}" if layers else ", for example [1, 9, 17]"
            raise ValueError(
                f"target_layer_ids is {list(layers)}; expected one or more layers, each once and in rising order: set "
                f"drafter.target_layer_ids to{rising}, or to null for the paper's spread"
            )
        return self

    @model_validator(mode="after")
    def _heads_have_what_they_read(self) -> DrafterSettings:
        reads_markov = self.enable_confidence_head and self.confidence_head_with_markov
        if self.algorithm == "dspark" and reads_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_head_with_markov needs a Markov embedding, but markov_rank is 0: set "
                "drafter.confidence_head_with_markov=false or drafter.markov_rank to 1 or more"
            )
        return self


class LossSettings(Section):
    """Weights of the loss terms; slot k (from 1) weighs exp(-(k-1)/position_decay).

    The defaults are DSpark's; dflash and eagle3 have their own (`pipelines/recipes.py`).
    """

    ce: NonNegative = 0.1  # to the text
    l1: NonNegative = 0.9  # to the target's distribution, as the next three
    kl: NonNegative = 0.0
    soft_ce: NonNegative = 0.0
    negative_log_acceptance: NonNegative = 0.0  # -log of the acceptance rate
    lk_hybrid: NonNegative = 0.0  # between kl and total variation, the more the latter the higher the acceptance rate
    lk_hybrid_decay: NonNegative = 3.0
    confidence: NonNegative = 1.0
    position_decay: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 4.0
    chunk_slots: Positive | None = None  # slots whose logits exist at once; null: chosen from the vocabulary

    @model_validator(mode="after")
    def _something_to_learn(self) -> LossSettings:
        if not any((self.ce, self.l1, self.kl, self.soft_ce, self.negative_log_acceptance, self.lk_hybrid)):
            raise ValueError(
                "every term but confidence is 0: nothing would be learnt; the paper uses ce 0.1 and l1 0.9"
            )
        return self
