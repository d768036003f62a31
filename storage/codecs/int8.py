"""One signed byte a value, with a bf16 scale for each token and group of neighbouring channels."""

from __future__ import annotations

import torch

from storage.codecs.registry import register
from storage.codecs.scaled import Scaled


@register
class Int8(Scaled):
    """Error at most half a step: the group's largest magnitude / 254."""

    name = "int8"
    top = 127.0
    codes = torch.int8
