"""The mathematics: models, losses, decoding, calibration, scheduling."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.models.checkpoint import load_drafter as load_drafter

__all__ = ["load_drafter"]


def __getattr__(name: str) -> Any:
    # Late, so that importing the package's configuration costs no torch.
    if name == "load_drafter":
        from dspark.models.checkpoint import load_drafter

        return load_drafter
    raise AttributeError(f"module 'dspark' has no attribute {name!r}")
