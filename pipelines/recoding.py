"""What codecs ask for beyond a cache when it is recoded: the target, or what a pilot found."""

from __future__ import annotations

from pathlib import Path

import torch

from dspark.decoding.target import DTYPES, Target, hash_weights
from pipelines.errors import UserError
from pipelines.settings.schema import CacheSettings, TargetSettings
from pipelines.stages.capture import COMPONENTS, read_components, target_parts
from pipelines.target_spec import locate_target
from storage.cache.target_cache import TargetCache
from storage.codecs.base import TargetParts
from storage.codecs.registry import CodecSpec
from storage.files.filesystems import Folder


def parts_of(cache: TargetCache, model: str, teacher: CodecSpec) -> TargetParts:
    """What the teacher codec asks of the target `model` (as in `target.model`), read as it was for the cache.

    Raises UserError when its weights are not those that the states were recorded from.
    """
    contract = cache.contract
    _, folder, _ = locate_target(TargetSettings(model=model))
    recorded = contract.get("weights_sha256")
    if recorded and (found := hash_weights(Path(folder))) != recorded:
        raise UserError(
            f"--target {model}: its weights ({found}) are not those that {cache.folder} was recorded from "
            f"({recorded}); give --target {contract.get('target_name')}"
        )
    dtype = cache.manifest["fields"]["inputs"].get("dtype")
    target = Target.open(
        folder,
        dtype=dtype if dtype in DTYPES else "float32",
        target_layer_ids=contract["target_layer_ids"],
    )
    return target_parts(target, teacher.name)


def components_of(cache: TargetCache, run: str, hidden_states: CodecSpec) -> tuple[CodecSpec, dict[str, torch.Tensor]]:
    """The codec with its number of components, and the components that the run's pilot found.

    Raises UserError where there is no pilot, or it looked at other layers.
    """
    pilot = Folder(run).location("pilot")
    if not Folder(pilot).exists(COMPONENTS):
        raise UserError(f"--pilot {run}: there is no {pilot}/{COMPONENTS}; run `dspark pilot CONFIG` first")
    components, fields = read_components(pilot), cache.manifest["fields"]
    width = fields["num_layers"] * fields["hidden_size"]
    if components["projection"].shape[1] != width:
        raise UserError(
            f"--pilot {run}: it looked at {components['projection'].shape[1]} values a token; "
            f"{cache.folder} keeps {width}"
        )
    count = round(CacheSettings().components * fields["hidden_size"])
    settings = {"directions": min(count, len(components["projection"])), **hidden_states.settings}
    return CodecSpec(name=hidden_states.name, settings=settings), components
