"""What every codec offers. R rows (tokens), W width of a state as captured, C width of what is decoded.

A payload holds one sequence. Row 0 of a sequence's first token is a world of its own (its norm is a hundred times the
others', and it depends on the first token id alone), so lossy codecs keep it apart and exact: payload = flag byte,
then the first row (shared: nothing; inline: its values), then the body with the other rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from storage.errors import StorageError

BF16 = torch.bfloat16
Payload = bytes | memoryview
Device = torch.device | str
Sample = Sequence[tuple[torch.Tensor, bool]]
"""Sequences to fit and measure on: (values [R, W], whether row 0 is the sequence's first token)."""

BOUNDS = {
    "level": (1, 22),  # of zstd
    "group": (1, math.inf),
    "step": (1e-4, 8.0),  # standard deviations; beyond it next to nothing is left
    "ridge": (0.0, math.inf),
    "focus": (0.0, 2.0),
    "directions": (1, math.inf),
    "top": (0, 1024),
    "resolution": (1, 1024),
}
"""What settings of these names may be, in whatever codec has them."""

NO_FIRST, SHARED_FIRST, INLINE_FIRST = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    """What some teacher codecs ask of the target, while they encode and while they are measured.

    `head` [V, d] and the final soft cap make logits of last states. `finish`: outputs of the last captured layer of a
    sequence from its first token on, [S, d], to last states [S, d]; None where no codec needs it.
    """

    head: torch.Tensor
    soft_cap: float | None = None
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[P, d] to [P, V] float32."""
        return self._capped((last.to(self.head.device, self.head.dtype) @ self.head.t()).float())

    def logits_of(self, last: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[P, d] to [P, K] float32, of the tokens [P, K] alone."""
        weight = self.head[token_ids]
        return self._capped(torch.bmm(weight, last.to(weight.device, weight.dtype)[:, :, None])[..., 0].float())

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


@dataclass(frozen=True, kw_only=True)
class StoredTeacher:
    """The teacher of a row as a codec keeps it. P teacher positions, K tokens of each, d hidden size.

    Dense: `last_hidden_state` [P, d], whose logits are the teacher's; where `top_ids` [P, K] are there, `top_values`
    are added to the logits of those tokens before the softmax. Recomputed: `source` [S', d] instead, outputs of the
    last captured layer from the first token to the last teacher position. Sparse: neither; `top_values` are the
    log-probabilities of `top_ids`, and `tail_mass` [P] is the probability of all other tokens.
    """

    last_hidden_state: torch.Tensor | None = None
    source: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_values: torch.Tensor | None = None
    tail_mass: torch.Tensor | None = None
    log_normalizers: torch.Tensor | None = None  # of the dense logits, where a reader has worked them out

    def recomputed(
        self, upper_layers: Callable[[torch.Tensor], torch.Tensor], positions: torch.Tensor
    ) -> StoredTeacher:
        """With `last_hidden_state` at `positions` [P] in the place of `source`."""
        assert self.source is not None
        states = upper_layers(self.source)
        return replace(self, source=None, last_hidden_state=states[positions.to(states.device)])


@dataclass(frozen=True, kw_only=True)
class TeacherRow:
    """A sequence to fit teacher codecs on: captured states [S, m*d], last states [S, d], positions [P]."""

    hidden_states: torch.Tensor
    last_hidden_state: torch.Tensor
    positions: np.ndarray


def last_state_sample(rows: Sequence[TeacherRow]) -> Sample:
    """What a codec of last states is fitted on: the states at the teacher positions."""
    used = [row for row in rows if len(row.positions)]
    return [(row.last_hidden_state[torch.from_numpy(row.positions)], bool(row.positions[0] == 0)) for row in used]


class Codec(ABC):
    """Settings (JSON) and tensors (fitted) turn states into bytes and back."""

    name: ClassVar[str]
    exact: ClassVar[bool] = False
    teacher_only: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = BOUNDS  # of the settings that have such names

    def __init__(
        self,
        *,
        width: int,
        settings: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.width = width
        self.settings = self.complete(settings or {})
        self.tensors: dict[str, torch.Tensor] = dict(tensors or {})
        self.measured: dict[str, Any] = {}
        self.target: TargetParts | None = None
        self._copies: dict[tuple[str, torch.device], torch.Tensor] = {}

    @classmethod
    def complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings over the defaults. ValueError for an unknown one, or a value that it cannot have."""
        unknown = set(settings) - set(cls.defaults)
        if unknown:
            raise StorageError(
                f"codec {cls.name!r} has no setting {min(unknown)!r}; it has {', '.join(cls.defaults) or 'none'}"
            )
        for name, value in settings.items():
            default, (least, most) = cls.defaults[name], cls.bounds.get(name, (-math.inf, math.inf))
            if isinstance(default, str) or value == default:
                continue
            kind = int | float if isinstance(default, float) else int
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
                named = "a number" if isinstance(default, float) else "a whole number"
                ends = f" from {least:g} to {most:g}" if most < math.inf else f" of {least:g} or more"
                shown = ends if name in cls.bounds else ""
                raise StorageError(f"codec {cls.name!r}: {name} = {value!r}, it must be {named}{shown}")
        return {**cls.defaults, **settings}

    def tensor_on(self, name: str, device: Device) -> torch.Tensor:
        """A fitted tensor on a device; a copy on another one than it was fitted on is made once."""
        tensor, place = self.tensors[name], torch.device(device)
        if place == tensor.device:
            return tensor
        if (name, place) not in self._copies:
            self._copies[name, place] = tensor.to(place)
        return self._copies[name, place]

    @classmethod
    def fit(
        cls,
        sample: Sample,
        *,
        width: int,
        layers: int = 1,
        tensors: Mapping[str, torch.Tensor] | None = None,
        **settings: Any,
    ) -> Self:
        """A codec whose statistics come from the sample; see `fit_codec`."""
        codec = cls(width=width, settings=settings)
        codec.learn(sample, layers, tensors or {})
        return codec

    def learn(self, sample: Sample, layers: int, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: B027
        """Take the statistics of the sample into `self.tensors`. Most codecs have none."""

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        """A codec of the teacher; one that does not know the target codes the last states at the teacher positions."""
        return cls.fit(last_state_sample(rows), width=width, **settings)

    def check(self) -> None:
        """StorageError unless the tensors, which come from a file, are those of such a codec."""
        self.require_tensor("first_row", (self.out_width,), needed=False)

    def require_tensor(self, name: str, *shapes: tuple[int, ...], needed: bool = True) -> None:
        """StorageError unless the tensor has one of these shapes, or is not there and not needed."""
        tensor = self.tensors.get(name)
        if tensor is None and not needed:
            return
        found = None if tensor is None else tuple(tensor.shape)
        if found not in shapes or (tensor is not None and not (tensor.is_floating_point() or name == "classes")):
            raise StorageError(f"codec {self.name!r}: its tensor {name!r} is {found}, expected {shapes}")

    @property
    def out_width(self) -> int:
        """C: the width of what `decode` returns."""
        return self.width

    @abstractmethod
    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        """values [R, W] to bytes. `first`: row 0 is the first token of its sequence."""

    @abstractmethod
    def decode(self, payload: Payload, rows: int, *, device: Device = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
        """Bytes to [R, C]. ValueError if the payload does not hold `rows` rows."""

    def components(self, values: torch.Tensor) -> torch.Tensor:
        """What a perfect decoding of `values` [R, W] would return, [R, C] float32."""
        return values.float()

    def encode_teacher(self, hidden_states: torch.Tensor, last: torch.Tensor, positions: np.ndarray) -> bytes:
        """A row's teacher to bytes: captured states [S, W of the context], last states [S, d], positions [P]."""
        return self.encode(last[torch.from_numpy(positions).to(last.device)], first=bool(positions[0] == 0))

    def decode_teacher(
        self, payload: Payload, positions: np.ndarray, *, device: Device = "cpu", dtype: torch.dtype = BF16
    ) -> StoredTeacher:
        """Bytes to the teacher at `positions` [P]."""
        return StoredTeacher(last_hidden_state=self.decode(payload, len(positions), device=device, dtype=dtype))

    @property
    def projection(self) -> torch.Tensor | None:
        """P [C, W] if what is decoded are components P x of the states x, else None."""
        return None

    @property
    def unprojection(self) -> torch.Tensor | None:
        """[W, C]: states out of components, in the least-squares sense; None where `projection` is."""
        return None


class TeacherCodec(Codec):
    """A codec that knows the target and codes the teacher alone."""

    teacher_only = True

    @classmethod
    def fit_rows(cls, rows: Sequence[TeacherRow], target: TargetParts | None, *, width: int, **settings: Any) -> Self:
        return cls(width=width, settings=settings)


class LossyCodec(Codec):
    """Handles the first row; a subclass codes the others."""

    inline_dtype: ClassVar[torch.dtype] = torch.bfloat16

    @abstractmethod
    def encode_rows(self, components: torch.Tensor) -> bytes:
        """[R, C] float32 to bytes."""

    @abstractmethod
    def decode_rows(self, payload: memoryview, rows: int, device: Device) -> torch.Tensor:
        """Bytes to [R, C], float32 or bfloat16."""

    def encode(self, values: torch.Tensor, *, first: bool = False) -> bytes:
        components = self.components(values)
        if not first or len(components) == 0:
            return bytes([NO_FIRST]) + self.encode_rows(components)
        shared, first_row = self.tensors.get("first_row"), components[0].cpu()
        if shared is not None and is_same_first_row(first_row, shared):
            return bytes([SHARED_FIRST]) + self.encode_rows(components[1:])
        inline = raw_bytes(first_row.to(self.inline_dtype))
        return bytes([INLINE_FIRST]) + inline + self.encode_rows(components[1:])

    def decode(self, payload: Payload, rows: int, *, device: Device = "cpu", dtype: torch.dtype = BF16) -> torch.Tensor:
        view = memoryview(payload).cast("B")
        flag, view = (view[0] if len(view) else None), view[1:]
        if flag == NO_FIRST:
            return self.decode_rows(view, rows, device).to(dtype)
        if flag == SHARED_FIRST and "first_row" in self.tensors:
            first = self.tensors["first_row"]
        elif flag == INLINE_FIRST:
            size = self.out_width * self.inline_dtype.itemsize
            first, view = from_raw(view[:size], self.inline_dtype, self.out_width), view[size:]
        else:
            raise StorageError(f"codec {self.name!r}: first-row flag {flag} is unknown")
        others = self.decode_rows(view, rows - 1, device)
        result = torch.empty(rows, self.out_width, dtype=dtype, device=device)
        result[0] = first.to(device=device, dtype=dtype)
        result[1:] = others
        return result


def is_same_first_row(row: torch.Tensor, shared: torch.Tensor) -> bool:
    """Whether two first-token states [C] differ by no more than rounding in another batch shape does."""
    scale = shared.abs().median()
    return bool(((row - shared.float()).abs() <= 0.02 * shared.float().abs() + 0.02 * scale).all())


def common_first_row(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """The first-token state [C] that most sequences of the sample share, or None if no two share one."""
    best, count = None, 1
    for index, row in enumerate(rows[:16]):
        same = sum(is_same_first_row(other, row) for other in rows[index:])
        if same > count:
            best, count = row, same
    return best


def gather(sample: Sample, of: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float) -> torch.Tensor:
    """`of` each sequence's states, all rows but first tokens, [R, C] float32. ValueError for fewer than two."""
    pieces = [of(values)[1 if first else 0 :] for values, first in sample if len(values)]
    if sum(map(len, pieces)) < 2:
        raise StorageError("a codec cannot be fitted: the sample has fewer than 2 rows after first tokens")
    return torch.cat(pieces)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, little-endian, in row-major order."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def from_raw(data: bytes | memoryview, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of that shape over a copy of the bytes. StorageError unless there are just as many as it takes."""
    size, expected = memoryview(data).nbytes, math.prod(shape) * dtype.itemsize
    if size != expected:
        raise StorageError(f"{size} bytes found where {expected} should be")
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype).view(shape)


def as_tensor(values: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Torch or numpy to torch; uint16 arrays are bf16 bits."""
    if isinstance(values, np.ndarray):
        if values.dtype == np.uint16:
            return torch.from_numpy(values.astype(np.uint16, copy=True).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(values))
    return values.detach()
