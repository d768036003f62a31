"""Confidence against what happened: measures, and the temperatures that repair it. Pure numpy.

R rounds, G slots. A slot's confidence c_k is the probability that draft k is accepted given that all before it were;
its survival a_k = c_1 ... c_k (section 3.2.1 of the DSpark paper).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def sigmoid(logits: ArrayLike) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    x = np.asarray(logits, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small))


def survival(confidence_logits: ArrayLike, temperatures: ArrayLike | None = None) -> Floats:
    """Confidence logits [R, G] and divisors [G] (None: all 1) to survival probabilities [R, G]."""
    logits = np.asarray(confidence_logits, dtype=np.float64)
    if temperatures is not None:
        logits = logits / np.asarray(temperatures, dtype=np.float64)[: logits.shape[-1]]
    return np.asarray(np.cumprod(sigmoid(logits), axis=-1))
