"""What a run asks of a drafter's folder before it uses it: whole, as it was written, and for this run's target."""

from __future__ import annotations

from pathlib import Path

from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.manifest import CheckpointError
from dspark.models.checkpoint import read_config
from pipelines.errors import UserError
from pipelines.settings import Settings
from pipelines.target_spec import TargetSpec, resolve_target


def remade(folder: str | Path) -> str:
    """The cure for a folder that this run made: train's is written again from its last checkpoint."""
    return f"remove {folder} and run the same command again, which writes it anew"


def published_config(folder: str | Path, settings: Settings, option: str) -> DrafterConfig:
    """The configuration of a drafter that was published before. No weight is loaded.

    Raises UserError naming `option` unless its files are whole and it was made for the target of these settings.
    """
    try:
        config = read_config(folder)
        require_target(folder, config, resolve_target(settings), settings)
    except CheckpointError as error:
        raise UserError(f"{option}: {error}") from error
    return config


def require_target(folder: str | Path, config: DrafterConfig, spec: TargetSpec, settings: Settings) -> None:
    """Raises CheckpointError for a drafter of another target: other sizes, weights or tokenizer.

    The hashes are compared where the folder has a contract.
    """
    place, cure = Path(folder).expanduser(), "give a drafter of this run's target, or set target.model to its target"
    sizes = {name: (getattr(config, name), getattr(spec, name)) for name in ("vocab_size", "hidden_size")}
    contract = Contract.read(place)
    if contract is not None:
        ours = spec.contract(settings, with_block=False)
        hashes = ("weights_sha256", "tokenizer_sha256")
        sizes = {name: (getattr(contract, name), ours[name]) for name in hashes} | sizes
    other = [f"{name} is {theirs} there and {ours} here" for name, (theirs, ours) in sizes.items() if theirs != ours]
    if other:
        whose = "another target" if contract is None else f"the target {contract.target_name!r}"
        raise CheckpointError(f"the drafter in {place} was made for {whose}: {'; '.join(other)}: {cure}")
