"""Settings of a run: one frozen model a section, checked before anything starts.

A default stands here and nowhere else; where it is the paper's value, the YAML files need not repeat it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from dspark.config import MAX_BLOCK_SIZE, DrafterConfig, check_heads
from dspark.losses.losses import LossConfig, loss_settings, loss_terms, slot_weightings
from dspark.registry import algorithms
from pipelines.plugins import load_texts, plugin_texts
from pipelines.settings.recipes import require_fitting_loss
from pipelines.tracking import trackers
from storage.codecs.registry import HIDDEN_STATES, TEACHER, codec_class, known_codec

Positive = Annotated[int, Field(ge=1, le=2**53)]  # what JSON, and a reader in any language, keeps whole
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


def _samplable(temperature: float) -> float:
    if 0 < temperature < 1e-5:
        raise ValueError("a temperature is 0 (greedy), or 1e-05 or more")
    return temperature


Temperature = Annotated[NonNegative, AfterValidator(_samplable)]
_Values = TypeVar("_Values", bound=tuple[object, ...])


def _each_once(values: _Values) -> _Values:
    """Files and figures are named by such values, numbers to six digits: two that read alike would be one."""
    counts = Counter(f"{value + 0.0:g}" if isinstance(value, float) else str(value) for value in values)
    if repeated := [text for text, count in counts.items() if count > 1]:
        raise ValueError(
            f"{', '.join(repeated)} stands there more than once; each value is measured once: leave it out"
        )
    return values


Distinct = AfterValidator(_each_once)  # of a list
Algorithm = Annotated[str, AfterValidator(algorithms.known)]
TrackerName = Annotated[str, AfterValidator(trackers.known)]
WandbMode = Literal["auto", "offline", "online", "disabled"]


def _codec_of(part: str) -> Any:
    """`auto`, or the name of a codec that codes the part."""
    return AfterValidator(lambda name: name if name == "auto" else known_codec(name, part))


HiddenStatesCodec = Annotated[str, _codec_of(HIDDEN_STATES)]
TeacherCodec = Annotated[str, _codec_of(TEACHER)]


class Section(BaseModel):
    """Frozen, strict, and without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class RunSettings(Section):
    """Where the run's outputs go, and the seed that every random draw starts from."""

    directory: str = Field(min_length=1)  # a local folder, s3://... or gs://...
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _names_a_place(self) -> RunSettings:
        if "://" in self.directory and not self.directory.partition("://")[2].strip("/"):
            raise ValueError(
                f"directory is {self.directory!r}, which names no bucket: write {self.directory}BUCKET/FOLDER"
            )
        return self


class TargetSettings(Section):
    """The language model that the drafter is for."""

    model: str = Field(min_length=1)  # a folder, a Hugging Face id, or package:NAME for one out of a pinned package
    revision: str | None = None  # of a Hugging Face id; the commit it resolves to is recorded
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    thinking: Literal["off", "on", "mixed"] = "off"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    trust_remote_code: bool = False


class PromptSource(Section):
    """Prompts of one source.

    `source` is `demonstration:SPLIT` (shipped), `benchmark:NAME`, `hub:OWNER/NAME`, or the path of a JSONL file whose
    rows have `conversations` or `turns`. On a machine without a hub, `folder` has NAME.jsonl of the benchmarks.
    """

    source: str = Field(min_length=1)
    revision: str | None = None  # hub and benchmark sources
    subset: str | None = None  # hub sources
    split: str = "train"  # hub sources
    folder: str | None = None  # benchmark sources: NAME.jsonl is read here instead of the hub, as many rows of it
    domain: str | None = None  # overrides the rows' own
    turns: Literal["first", "all"] | None = None  # null: all, but the first of a benchmark, as in the paper
    skip: Annotated[int, Field(ge=0)] = 0
    limit: Positive | None = None


class DataSettings(Section):
    """Prompts of the three splits; no prompt may stand in two of them."""

    train: tuple[PromptSource, ...] = (PromptSource(source="demonstration:train"),)
    calibration: tuple[PromptSource, ...] = (PromptSource(source="demonstration:calibration"),)
    evaluation: tuple[PromptSource, ...] = (PromptSource(source="demonstration:evaluation"),)
    mask_history: bool = False  # train on the last answer of a conversation only, instead of on all of them
    min_supervised_tokens: Annotated[int, Field(ge=0)] = 14  # rows with fewer are dropped and counted
    on_bad_row: Literal["error", "skip"] = "error"  # a row that cannot be read or rendered; skip: left out and counted
    render_time: datetime | None = None  # what a chat template takes for the time; null: when the run began


class RegenerateSettings(Section):
    """How the target writes its own answers to the training prompts."""

    temperature: Temperature = 0.7
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    top_k: Annotated[int, Field(ge=0)] = 20  # 0: no limit
    max_new_tokens: Positive = 4096
    batch_size: Positive = 64  # prompts that a worker answers at once
    num_workers: Positive = 1
    prompts_per_work_item: Positive = 128  # what a stop can lose


class CacheSettings(Section):
    """The target cache.

    Codecs are described in docs/cache-format.md. `auto` takes the smallest one whose measured error of the acceptance
    rate stays within `acceptance_bound`; a projected or automatic cache begins with a pilot (section `pilot`).
    """

    hidden_states_codec: HiddenStatesCodec = "projected"  # auto, projected, transform, int8, fp8, bf16-planes, bf16
    teacher_codec: TeacherCodec = "corrected"  # those but projected, and corrected, recomputed, sparse
    hidden_states_options: dict[str, Any] = Field(default={})  # the codec's own settings, laid over its defaults
    teacher_options: dict[str, Any] = Field(default={})
    components: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.5  # projected: how many, in hidden sizes
    acceptance_bound: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.01  # auto
    temperature: Temperature = 1.0  # of decoding, at which errors of the acceptance rate are measured
    tokens_per_shard: Positive = 1_000_000  # a shard is a work item
    max_length: Positive = 4096  # longer conversations are cut; what is kept stays supervised
    max_num_batched_tokens: Positive = 16_384  # in a forward pass, padding included
    num_workers: Positive = 1
    max_bytes: Positive | None = None
    audit_rows: Annotated[int, Field(ge=0)] = 8

    @property
    def needs_pilot(self) -> bool:
        return self.trains_pilot or self.teacher_codec == "auto"

    @property
    def trains_pilot(self) -> bool:
        return self.hidden_states_codec in ("auto", "projected")

    def codec_of(self, part: str) -> tuple[str, dict[str, Any]]:
        """Name and options of the codec of a part of a cache's row: `features` (the hidden states) or `teacher`."""
        if part == "teacher":
            return self.teacher_codec, self.teacher_options
        return self.hidden_states_codec, self.hidden_states_options

    @property
    def automatic_codecs(self) -> list[str]:
        """The parts whose codec the pilot chooses."""
        return [part for part in ("features", "teacher") if self.codec_of(part)[0] == "auto"]

    @model_validator(mode="after")
    def _options_have_their_codec(self) -> CacheSettings:
        for part in ("hidden_states", "teacher"):
            name, options = getattr(self, f"{part}_codec"), getattr(self, f"{part}_options")
            if not options:
                continue
            if name == "auto":
                raise ValueError(f"cache.{part}_options are for a codec by name, but cache.{part}_codec is auto")
            try:
                codec_class(name).complete(options)
            except ValueError as error:
                raise ValueError(f"cache.{part}_options: {error}") from None
        return self


class PilotSettings(Section):
    """A short training on the exact states of a few conversations, which tells what of the states drafters look at.

    It runs by itself where the cache asks for it (`cache.hidden_states_codec` projected or auto). With several
    algorithms each has a pilot, and drafters of all of them can be trained from the one cache.
    """

    share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1  # of the conversations; 24 or all of them at least
    max_tokens: Positive = 1_000_000  # but no more than these
    algorithms: Annotated[tuple[Algorithm, ...], Distinct] = ()  # none: the drafter's own
    # null: train.num_train_epochs, or more for 96 steps, if the training itself has as many
    num_train_epochs: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    max_steps: Positive | None = None  # null: train.max_steps
    global_batch_size: Positive = 32  # or the training's, where that is smaller: few conversations, many steps


class DrafterSettings(Section):
    """The drafter's parts. What is null is taken from the target; an algorithm may have defaults of its own."""

    algorithm: Algorithm = DrafterConfig.algorithm
    num_draft_layers: Positive = DrafterConfig.num_draft_layers
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_SIZE)] = DrafterConfig.block_size  # draft tokens a round
    block_layout: Literal["anchor-first", "mask-first"] = DrafterConfig.block_layout
    target_layer_ids: tuple[Annotated[int, Field(ge=-1)], ...] | None = None  # captured; null: the algorithm's own
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    markov_rank: Annotated[int, Field(ge=0)] = DrafterConfig.markov_rank  # 0: no sequential head
    markov_head_type: str = "vanilla"  # or gated, rnn
    enable_confidence_head: bool = DrafterConfig.enable_confidence_head
    confidence_head_with_markov: bool = DrafterConfig.confidence_head_with_markov
    # The projected target state before the anchor is added to every slot's input. No engine loads such a drafter.
    context_residual: bool = DrafterConfig.context_residual
    draft_vocab_size: Positive | None = None  # null: the target's whole vocabulary
    options: dict[str, Any] = Field(default={})  # settings that only this algorithm has
    initial_weights: str = Field(default="target", min_length=1)  # random, target, or a published drafter's folder

    # The final norm starts scaled down, so that the backbone's first logits vary no more than the bigrams' do.
    match_initial_logits: bool = False

    @property
    def parts(self) -> dict[str, Any]:
        """The fields of `DrafterConfig` that these settings decide; what the algorithm has not is off."""
        parts = {name: value for name, value in self if name in DrafterConfig.__dataclass_fields__}
        return parts | dict(algorithms[self.algorithm].fixed)

    @property
    def has_confidence_head(self) -> bool:
        return bool(self.parts["enable_confidence_head"])

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
    def _heads_can_be(self) -> DrafterSettings:
        check_heads(SimpleNamespace(**self.parts))
        return self


class _LossSettings(Section):
    """Weights of the loss terms, which `dspark.losses.losses` lists with their options and defaults; a plugin's too.

    The defaults are DSpark's; other algorithms have their own (`loss` of their class).
    """

    model_config = ConfigDict(extra="allow")  # terms of plugins

    position_decay: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 4.0  # slot k from 1: exp(-(k-1)/decay)
    # d-pace or acceptance: a slot weighs by its chances, and position_decay counts nothing; null: by its place alone.
    slot_weighting: Annotated[str, AfterValidator(slot_weightings.known)] | None = None
    soft_ce_warmup_ratio: Share = 0.0  # share of the steps in which soft cross-entropy gives way to the other terms
    chunk_slots: Positive | None = None  # slots whose logits exist at once; null: chosen from the vocabulary

    @property
    def config(self) -> LossConfig:
        """What training takes. Raises ValueError for a term that there is not, or where nothing would be learnt."""
        return LossConfig(**self.model_dump())

    @model_validator(mode="after")
    def _is_a_loss(self) -> _LossSettings:
        _ = self.config
        return self


if TYPE_CHECKING:
    LossSettings = _LossSettings
else:
    meanings = {name: inspect.getdoc(loss_terms[name]).partition("\n")[0] for name in loss_terms}
    of_terms = {
        name: (NonNegative, Field(default, description=meanings.get(name))) for name, default in loss_settings().items()
    }
    LossSettings = create_model(
        "LossSettings", __base__=_LossSettings, __module__=__name__, __doc__=_LossSettings.__doc__, **of_terms
    )


class TrainSettings(Section):
    """Training under DeepSpeed. Sizes are of the global batch: workers and micro-batches do not change a step."""

    num_train_epochs: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 10.0
    max_steps: Positive | None = None  # stops earlier, and the schedule ends there
    global_batch_size: Positive = 512  # sequences
    num_anchors: Positive = 512  # a sequence, at most
    anchor_rule: Literal["paper", "any_prefix"] = "paper"
    learning_rate: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 6e-4
    warmup_ratio: Share = 0.04
    lr_scheduler_type: Literal["cosine", "constant", "wsd"] = "cosine"
    optimizer: Literal["adamw", "adam", "nadam", "radam", "sgd"] = "adamw"
    weight_decay: NonNegative = 0.0
    max_grad_norm: NonNegative = 1.0  # 0: no clipping
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # learning rate of a layer, relative to the one above
    precision: Literal["float32", "bfloat16"] = "bfloat16"  # bfloat16 keeps float32 master weights
    accumulate_float32: bool = False  # bfloat16 at zero_stage 1: add the micro-batches' gradients up in float32
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    num_workers: Positive = 1
    min_workers: Positive | None = None  # elastic: go on with as few after a loss; null: wait for all of them
    max_tokens_per_micro_batch: Positive = 16_384  # context tokens + block slots
    loss: LossSettings = LossSettings()
    validation_samples: Annotated[int, Field(ge=0)] = 0  # conversations of the cache that are not trained on
    eval_steps: Positive | None = None  # steps between validations; null: at each checkpoint
    load_best_model_at_end: bool = False  # the final drafter is the checkpoint of the best validation tau, not the last
    save_steps: Positive = 500  # steps between checkpoints
    checkpoint_in_background: bool = False  # write files while training goes on; takes memory for one more copy
    save_total_limit: Positive = 2  # the newest checkpoints; with validation, the best one is kept besides
    logging_steps: Positive = 10  # steps between lines of the log
    max_failures: Annotated[int, Field(ge=0)] = 3  # restarts after lost workers
    max_bad_steps: Positive = 10  # steps in a row without a finite loss and gradient, after which training stops
    dataloader_num_workers: Annotated[int, Field(ge=0)] = 0  # processes a worker that decode ahead; 0: a thread
    loader_bytes: Positive = 2**31  # of decoded states that wait to be used, a worker
    shuffle_window: Positive | None = None  # shards mixed by a shuffle, for remote caches; null: all of them
    local_copy: str | None = None  # folder for shards of a remote cache; null: one below the temporary folder
    local_copy_bytes: Positive | None = None  # the most that is kept there; null: everything
    gradient_checkpointing: bool = False  # recompute the layers' activations in the backward pass
    torch_compile: bool = False  # the draft layers
    deepspeed: dict[str, Any] = Field(default={})  # laid over the generated DeepSpeed JSON, key by key

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is more than num_workers {self.num_workers}: set it to that or less"
            )
        if self.precision == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "precision bfloat16 needs the float32 masters that ZeRO keeps: set zero_stage to 1 or more"
            )
        if self.accumulate_float32 and (self.precision, self.zero_stage) != ("bfloat16", 1):
            raise ValueError("accumulate_float32 goes with precision bfloat16 at zero_stage 1; float32 does it anyway")
        if self.load_best_model_at_end and self.validation_samples == 0:
            raise ValueError("load_best_model_at_end needs validation_samples of 1 or more, to tell the best")
        return self


class CalibrateSettings(Section):
    """Repair of the confidences on the calibration prompts, with a table for each decoding temperature."""

    # temperature: the paper's sequential temperature scaling; affine: a shift a slot as well
    method: Literal["temperature", "affine"] = "temperature"
    # Of the decodings. Sampled text is read with the nearest table; greedy text only with one of temperature 0.
    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1), Distinct] = (1.0,)
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), Distinct] = (0,)  # where T > 0
    max_new_tokens: Positive = 2048
    batch_size: Positive = 16
    num_workers: Positive = 1


class StepCostSettings(Section):
    """Steps per second against tokens in the verification batch: measured for this target and device, or read.

    Schedulers decide by it, and the serving comparison beyond the engine's own load is computed from it.
    """

    table: str | None = None  # a step-cost JSON measured elsewhere; null: measured here
    tokens: Annotated[tuple[Positive, ...], Field(min_length=1), Distinct] = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
    context: Positive = 256  # tokens that each row holds already
    repeats: Positive = 3  # the best of so many


class ServingSettings(Section):
    """Closed-loop load: a number of users, each with one request at a time, for every length policy.

    At `measured_users` the engine itself decodes; at `users` recorded rounds are replayed over the step costs.
    """

    temperature: Temperature | None = None  # one of evaluate.temperatures; null: the last of them
    users: Annotated[tuple[Positive, ...], Distinct] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    measured_users: Annotated[tuple[Positive, ...], Distinct] = (1, 4, 16)
    max_new_tokens: Positive = 64  # of a measured request


class EvaluateSettings(Section):
    """Speculative decoding of the evaluation prompts, beside plain decoding."""

    temperatures: Annotated[tuple[Temperature, ...], Field(min_length=1), Distinct] = (0.0, 1.0)
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), Distinct] = (0,)
    max_new_tokens: Positive = 2048
    batch_size: Positive = 16
    num_workers: Positive = 1
    # How many drafts a round verifies. Another policy than full is decoded beside it: acceptance figures need whole
    # blocks.
    policy: Literal["full", "static", "threshold", "scheduler", "two-steps-behind"] = "full"
    static_length: Positive = 3  # of policy static, which the serving comparison has too
    threshold: Share = 0.5  # of policy threshold
    without_drafter: bool = True  # decode without a drafter as well
    without_sequential_head: bool = True  # decode with the head off as well, at the first temperature
    one_slot: bool = False  # decode with the drafter's first slot alone as well
    baselines: dict[str, str] = Field(default={})  # name: folder of another published drafter, decoded as well
    cost: StepCostSettings = StepCostSettings()
    serving: ServingSettings | None = ServingSettings()  # null: no serving comparison

    @model_validator(mode="after")
    def _names_what_is_decoded(self) -> EvaluateSettings:
        if self.serving is not None and self.serving.temperature not in (None, *self.temperatures):
            raise ValueError(
                f"evaluate.serving.temperature is {self.serving.temperature:g}, which is not among "
                f"evaluate.temperatures {list(self.temperatures)}: its rounds would not be recorded"
            )
        if taken := {"dspark", "no-sequential-head", "one-slot", "plain"} & set(self.baselines):
            raise ValueError(f"evaluate.baselines: {', '.join(sorted(taken))} is the name of a variant of this run")
        return self


class PublishSettings(Section):
    """The folder that is published, and where it is uploaded."""

    name: str | None = None  # null: made from the target's and the algorithm's names
    dtype: Literal["float32", "bfloat16"] | None = None  # of the weights; null: the target's
    # That take the embedding's output (-1) among the target's hidden states, where it is one of them.
    engines: Annotated[tuple[str, ...], Distinct] = ()
    layouts: tuple[str, ...] = ()  # beside its own, each in a folder of its name: speculators, or a plugin's
    repository: str | None = None  # a Hugging Face repository to upload to; null: no upload
    private: bool = True
    license: str = "other"


class TrackingSettings(Section):
    """Where curves are sent; the local log is kept in any case."""

    trackers: tuple[TrackerName, ...] = ("wandb",)  # by name; `plugins` add more
    wandb: WandbMode = "auto"  # auto: as WANDB_MODE says, else online when a key is configured, else offline
    project: str = "dspark"
    entity: str | None = None
    tags: tuple[str, ...] = ()


class ClusterSettings(Section):
    """The Ray cluster."""

    address: str | None = None  # null: a cluster of this run's own, on this machine
    num_cpus: Positive | None = None  # null: all of this machine's
    num_gpus: Annotated[int, Field(ge=0)] | None = None
    object_store_bytes: Positive | None = None
    cpus_per_worker: Positive = 1
    gpus_per_worker: NonNegative = 0.0
    threads_per_worker: Positive | None = None  # of torch; null: the worker's CPUs
    working_dir: str = "."  # what a submitted job takes along
    max_upload_bytes: Annotated[int, Field(ge=1, le=500 * 2**20)] = 100 * 2**20  # of it; Ray takes no more than 500 MiB
    # Variables of this machine that a submitted job gets. Of one with a secret only the name goes: the cluster has it.
    env_vars: tuple[str, ...] = ("WANDB_MODE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "AWS_ENDPOINT_URL", "AWS_REGION")
    python: str = "python"  # the interpreter on the cluster's head that has this project's packages


class Settings(Section):
    """Everything a run is made of."""

    run: RunSettings
    target: TargetSettings
    data: DataSettings = DataSettings()
    regenerate: RegenerateSettings = RegenerateSettings()
    pilot: PilotSettings = PilotSettings()
    cache: CacheSettings = CacheSettings()
    drafter: DrafterSettings = DrafterSettings()
    train: TrainSettings = TrainSettings()
    calibrate: CalibrateSettings = CalibrateSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    publish: PublishSettings = PublishSettings()
    tracking: TrackingSettings = TrackingSettings()
    cluster: ClusterSettings = ClusterSettings()
    plugins: tuple[str, ...] = ()  # Python files, or modules, that add algorithms, loss terms, codecs or trackers

    def __getstate__(self) -> dict[Any, Any]:
        return {**super().__getstate__(), "plugin_texts": plugin_texts(self.plugins)}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        state = dict(state)  # a worker meets the settings first, and then what the plugins add
        load_texts(state["__dict__"]["plugins"], state.pop("plugin_texts"))
        super().__setstate__(state)

    @model_validator(mode="after")
    def _loss_fits_the_drafter(self) -> Settings:
        require_fitting_loss(self.drafter, self.train.loss)
        return self

    @model_validator(mode="after")
    def _cache_fits_the_drafter(self) -> Settings:
        wanted = {self.drafter.algorithm, *self.pilot.algorithms}
        whole = [name for name in algorithms if name in wanted and not algorithms[name].reads_components]
        if whole and self.cache.needs_pilot:
            part = "hidden_states" if self.cache.trains_pilot else "teacher"
            raise ValueError(
                f"cache.{part}_codec is {getattr(self.cache, f'{part}_codec')}, which begins with a pilot, and "
                f"{whole[0]} has none: it reads whole states; set cache.hidden_states_codec=int8 (or transform) and a "
                "teacher codec by name (int8, corrected, recomputed), and leave it out of pilot.algorithms"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values, every default written out."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """As a settings file that loads back to the same settings."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
