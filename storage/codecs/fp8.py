"""float8 e4m3, with a bf16 scale for each token and group of neighbouring channels."""

from __future__ import annotations

import torch

from storage.codecs.registry import register
from storage.codecs.scaled import Scaled


@register
class Fp8(Scaled):
    """float8 e4m3: relative error at most 1/16 of each value; the group's largest magnitude maps to 448."""

    name = "fp8"
    top = 448.0
    codes = torch.float8_e4m3fn
