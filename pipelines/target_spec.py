"""What a run needs to know of its target before any weight is loaded: where it is, what it is, how it is read.

Nothing here needs memory for the model: the driver of a run on a cluster may be a laptop.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dspark.registry import algorithms
from pipelines.data.chat import require_thinking_switch
from pipelines.errors import UserError
from pipelines.settings import Settings
from pipelines.settings.schema import TargetSettings

PACKAGE_PREFIX = "package:"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """`path` is what workers open; the rest identifies it and says how its states are captured."""

    name: str
    path: str
    revision: str | None
    text_config: dict[str, Any]
    hashes: dict[str, str]
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    stop_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return int(self.text_config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.text_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        return int(self.text_config["vocab_size"])

    @property
    def max_positions(self) -> int | None:
        """Tokens that the target may be given; None when its config does not say."""
        from dspark.decoding.target import context_length

        return context_length(self.text_config)

    def contract(self, settings: Settings, *, with_block: bool) -> dict[str, Any]:
        """The contract between cache, checkpoint and server; the block's fields stay open in a cache."""
        from dspark.contract import Contract

        drafter = settings.drafter
        has_block = with_block and algorithms[drafter.algorithm].needs_mask_token
        return Contract(
            target_name=self.name,
            target_revision=self.revision,
            thinking=settings.target.thinking,
            target_layer_ids=self.target_layer_ids,
            final_norm_applied=True,
            weights_sha256=self.hashes["weights_sha256"],
            tokenizer_sha256=self.hashes["tokenizer_sha256"],
            chat_template_sha256=self.hashes["chat_template_sha256"],
            block_layout=drafter.block_layout if has_block else None,
            block_size=drafter.block_size if with_block else None,
            mask_token_id=self.mask_token_id if has_block else None,
        ).to_dict()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def resolve_target(settings: Settings) -> TargetSpec:
    """The spec; worked out once a process for equal settings."""
    drafter = settings.drafter
    return _resolve(settings.target, drafter.algorithm, drafter.target_layer_ids, drafter.mask_token_id)


@lru_cache(maxsize=8)
def _resolve(section: TargetSettings, algorithm: str, layers: tuple[int, ...] | None, mask: int | None) -> TargetSpec:
    """Find the target (its package, a folder, or the hub at a pinned commit) and read its config and tokenizer."""
    from transformers import AutoConfig, GenerationConfig

    from dspark.decoding.target import (
        default_mask_token_id,
        hash_tokenizer,
        hash_weights,
        open_tokenizer,
        stop_tokens,
    )
    from dspark.decoding.target_checks import require_decoder, require_whole_weights

    name, path, revision = locate_target(section)
    remote = {"trust_remote_code": section.trust_remote_code, "revision": revision}
    if not Path(path, "config.json").is_file():
        raise UserError(
            f"target.model: {path} is no model folder: it has no config.json; give one as `save_pretrained` writes it"
        )
    try:
        config = AutoConfig.from_pretrained(path, **remote)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"target.model: {path}/config.json cannot be read ({reason}); fetch the target again"
        ) from error
    if not section.trust_remote_code:  # code from elsewhere may compute while it makes a model
        require_decoder(config, name)
    text_config = config.get_text_config()
    tokenizer = open_tokenizer(path, **remote)
    if tokenizer is None:
        raise UserError(f"the target {name!r} has no tokenizer files; put them beside its weights")
    if section.thinking != "off":
        require_thinking_switch(tokenizer, section.thinking)
    require_whole_weights(Path(path))
    weights = hash_weights(Path(path))
    if weights is None:
        raise UserError(f"the target {name!r} has no *.safetensors file in {path}; save it with `save_pretrained`")
    generation = GenerationConfig.from_pretrained(path) if Path(path, "generation_config.json").exists() else None
    return TargetSpec(
        name=name,
        path=str(path),
        revision=revision,
        text_config=json.loads(text_config.to_json_string(use_diff=False)),
        hashes={"weights_sha256": weights, **hash_tokenizer(tokenizer)},
        target_layer_ids=(
            algorithms[algorithm].default_layer_ids(text_config.num_hidden_layers) if layers is None else layers
        ),
        mask_token_id=default_mask_token_id(text_config, tokenizer) if mask is None else mask,
        stop_token_ids=tuple(sorted(stop_tokens(generation, text_config, tokenizer))),
    )


def local_folder(spec: TargetSpec) -> str:
    """The target's folder on this machine, fetched where the driver of the run has it and this machine does not.

    Raises UserError for a folder of the driver's that is not here.
    """
    if Path(spec.path).is_dir():
        return spec.path
    if spec.name.startswith(PACKAGE_PREFIX):
        return _packaged(spec.name)[0]
    if spec.revision is not None:
        from huggingface_hub import snapshot_download

        return snapshot_download(spec.name, revision=spec.revision, allow_patterns=HUB_FILES)
    raise UserError(
        f"target.model: the folder {spec.path!r} is not on this machine of the cluster; put it on storage that every "
        "machine sees, or name a model of the hub"
    )


def locate_target(section: TargetSettings) -> tuple[str, str, str | None]:
    """(name, local folder, revision) of the target; a hub model is fetched at the commit that is then recorded."""
    folder = Path(section.model).expanduser()
    packaged = section.model.startswith(PACKAGE_PREFIX)
    if section.revision is not None and (packaged or folder.is_dir()):
        place = "a package of a fixed version" if packaged else "a local folder"
        raise UserError(f"target.revision is {section.revision!r}, but {section.model} is {place}: drop it")
    if packaged:
        return section.model, *_packaged(section.model)
    if folder.is_dir():
        return section.model, str(folder), None
    if section.model.count("/") > 1 or section.model.startswith((".", "~", "/")):
        raise UserError(f"target.model: the folder {section.model!r} does not exist")
    return section.model, *_from_hub(section.model, section.revision)


def _packaged(name: str) -> tuple[str, str]:
    from pipelines.data.packaged_target import PACKAGED, packaged_target

    model = name.removeprefix(PACKAGE_PREFIX)
    folder = packaged_target(model)
    return str(folder), PACKAGED[model].version


def _from_hub(model: str, revision: str | None) -> tuple[str, str]:
    """(folder, commit) of a hub model; without the network, of the copy that an earlier run fetched."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        commit = HfApi().model_info(model, revision=revision).sha
        return snapshot_download(model, revision=commit, allow_patterns=HUB_FILES), str(commit)
    except Exception as error:  # the hub client raises many kinds; each becomes one message that names the cure
        try:
            path = snapshot_download(model, revision=revision, allow_patterns=HUB_FILES, local_files_only=True)
        except Exception:
            raise UserError(
                f"target.model: {model!r} is not a folder and could not be fetched from the Hugging Face hub "
                f"({type(error).__name__}: {error}); check the name, `hf auth login`, and the network"
            ) from error
        return path, Path(path).name
