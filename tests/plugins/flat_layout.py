"""A layout of one file, as somebody outside would write it: all weights in one vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dspark.config import DrafterConfig
from pipelines.publishing.layouts import Layout, layouts


@layouts.register("flat")
class Flat(Layout):
    description = "one long vector"

    @classmethod
    def require_form(cls, config: DrafterConfig) -> None:
        """Every drafter has one."""

    @classmethod
    def config(cls, config: DrafterConfig, *, target_name: str, architectures: list[str], dtype: str) -> dict[str, Any]:
        return {"block_size": config.block_size, "target": target_name, "dtype": dtype}

    @classmethod
    def tensors(cls, drafter: Any) -> Mapping[str, Tensor]:
        return {"weights": torch.cat([value.detach().cpu().flatten() for value in drafter.state_dict().values()])}
