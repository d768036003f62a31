"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen, strict, and without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
