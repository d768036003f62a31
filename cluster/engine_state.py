"""Weights and optimizer state of a DeepSpeed engine as plain tensors by parameter name, free of ranks and ZeRO stages.

ZeRO keeps flat fp32 partitions; each parameter knows which fragment of it lies in this rank's partition. Gathering adds
the fragments of all ranks up in a buffer (zeros elsewhere), in buckets, to rank 0. Restoring copies this rank's
fragments back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from cluster.errors import ClusterError

WEIGHT = "weight"
_BUCKET_ELEMENTS = 64 * 1024**2


def gather_state(
    engine: Any, parameters: Mapping[str, torch.nn.Parameter], *, weights_only: bool = False
) -> dict[str, torch.Tensor]:
    """`KEY/NAME` -> fp32 tensor on the CPU of rank 0; empty elsewhere. A collective call."""
    inner = _inner(engine)
    keys = [WEIGHT] if weights_only else [WEIGHT, *_state_keys(inner)]
    found: dict[str, torch.Tensor] = {}
    for key in keys:
        for bucket in _buckets(parameters):
            total = sum(_numel(p) for p in bucket.values())
            buffer = torch.zeros(total, dtype=torch.float32, device=engine.device)
            start = 0
            for parameter in bucket.values():
                target = buffer.narrow(0, start, _numel(parameter))
                _read(engine, inner, parameter, key, target)
                start += _numel(parameter)
            if engine.zero_optimization_stage() in (1, 2) and engine.world_size > 1:
                dist.reduce(buffer, dst=0)
            if engine.global_rank != 0:
                continue
            pieces = buffer.cpu().split([_numel(p) for p in bucket.values()])
            for (name, parameter), piece in zip(bucket.items(), pieces, strict=True):
                found[f"{key}/{name}"] = piece.clone().reshape(_shape(parameter))
    if not weights_only and engine.global_rank == 0:
        for key, value in _scalars(inner).items():
            found[f"scalar/{key}"] = value
    return found


def restore_state(engine: Any, parameters: Mapping[str, torch.nn.Parameter], state: Mapping[str, torch.Tensor]) -> None:
    """Copy a gathered state into this engine: masters, the weights that the module computes with, optimizer state."""
    _check(parameters, state)
    inner = _inner(engine)
    keys = sorted({key.split("/", 1)[0] for key in state} - {WEIGHT, "scalar"})
    scalars = {key.split("/", 1)[1]: value for key, value in state.items() if key.startswith("scalar/")}
    if keys or scalars:
        _make_state(engine, inner, keys, scalars)
    for name, parameter in parameters.items():
        for key in [WEIGHT, *keys]:
            _write(engine, inner, parameter, key, state[f"{key}/{name}"].to(engine.device, torch.float32))


def _inner(engine: Any) -> Any:
    """The torch optimizer below DeepSpeed's wrappers."""
    return engine.basic_optimizer


def _state_keys(inner: Any) -> list[str]:
    """Names of the per-element state: what has the parameter's own size."""
    keys: set[str] = set()
    for flat, state in inner.state.items():
        keys |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() == flat.numel() and v.dim()}
    return sorted(keys)


def _scalars(inner: Any) -> dict[str, torch.Tensor]:
    """The state that counts steps: the same number for every parameter."""
    for state in inner.state.values():
        return {k: v.detach().cpu().clone() for k, v in state.items() if isinstance(v, torch.Tensor) and not v.dim()}
    return {}


def _make_state(engine: Any, inner: Any, keys: Iterable[str], scalars: Mapping[str, torch.Tensor]) -> None:
    """Give an optimizer that has taken no step yet its state, as its first step would."""
    group = inner.param_groups[0]
    flats = [flat for one in inner.param_groups for flat in one["params"]]
    if engine.zero_optimization_stage() == 3:  # which hands its sub-groups to the optimizer only while it steps
        flats = engine.optimizer.fp32_partitioned_groups_flat
    for flat in flats:
        state = inner.state[flat]
        for key in keys:
            if not isinstance(state.get(key), torch.Tensor):
                state[key] = torch.zeros_like(flat, requires_grad=False)
        for key, value in scalars.items():
            on_device = group.get("fused") or group.get("capturable")
            state[key] = value.clone().to(flat.device if on_device else "cpu")


def _read(engine: Any, inner: Any, parameter: Any, key: str, target: torch.Tensor) -> None:
    """Write this rank's part of a parameter's tensor into `target` [numel]."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        optimizer = parameter._z3_optimizer
        whole = optimizer.get_full_hp_param(parameter, None if key == WEIGHT else key)
        target.copy_(whole.reshape(-1))
    elif stage == 0:
        source = parameter if key == WEIGHT else inner.state[parameter][key]
        target.copy_(source.detach().reshape(-1))
    elif parameter._hp_mapping is not None:
        inside = parameter._hp_mapping.lp_fragment_address
        target.narrow(0, inside.start, inside.numel).copy_(_fragment(inner, parameter, key))


def _write(engine: Any, inner: Any, parameter: Any, key: str, value: torch.Tensor) -> None:
    stage = engine.zero_optimization_stage()
    if stage == 3:
        _write_stage_3(parameter, key, value)
    elif stage == 0:
        target = parameter.data if key == WEIGHT else inner.state[parameter][key]
        target.copy_(value.reshape(target.shape))
    else:
        if key == WEIGHT:
            parameter.data.copy_(value.reshape(parameter.shape))
        if parameter._hp_mapping is not None:
            inside = parameter._hp_mapping.lp_fragment_address
            _fragment(inner, parameter, key).copy_(value.reshape(-1).narrow(0, inside.start, inside.numel))


def _write_stage_3(parameter: Any, key: str, value: torch.Tensor) -> None:
    import deepspeed

    optimizer = parameter._z3_optimizer
    share = parameter.partition_numel()  # the last rank's is padded
    padded = torch.zeros(share * dist.get_world_size(), device=value.device)
    padded[: value.numel()] = value.reshape(-1)
    mine = padded.narrow(0, share * dist.get_rank(), share)
    optimizer.set_local_hp_param(mine, parameter, None if key == WEIGHT else key)
    if key == WEIGHT:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value.reshape(parameter.shape))


def _fragment(inner: Any, parameter: Any, key: str) -> torch.Tensor:
    """This rank's fragment of a parameter in the flat fp32 partition, or in the optimizer's state beside it."""
    mapping = parameter._hp_mapping
    if key == WEIGHT:
        master: torch.Tensor = mapping.hp_fragment.data
        return master
    (flat,) = inner.param_groups[mapping.param_group_index]["params"]
    address = mapping.hp_fragment_address
    whole: torch.Tensor = inner.state[flat][key]
    return whole.narrow(0, address.start, address.numel)


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: Any) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _buckets(parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[dict[str, torch.nn.Parameter]]:
    bucket: dict[str, torch.nn.Parameter] = {}
    for name, parameter in parameters.items():
        if bucket and sum(map(_numel, bucket.values())) + _numel(parameter) > _BUCKET_ELEMENTS:
            yield bucket
            bucket = {}
        bucket[name] = parameter
    if bucket:
        yield bucket


def _check(parameters: Mapping[str, torch.nn.Parameter], state: Mapping[str, torch.Tensor]) -> None:
    keys = {key.split("/", 1)[0] for key in state} - {"scalar"} | {WEIGHT}
    wanted = {f"{key}/{name}": _shape(p) for key in keys for name, p in parameters.items()}
    given = {key: value.shape for key, value in state.items() if not key.startswith("scalar/")}
    missing, extra = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    shapes = [f"{k}: {tuple(given[k])} in the state, {tuple(wanted[k])} here" for k in wanted if k in given]
    shapes = [text for text, k in zip(shapes, (k for k in wanted if k in given), strict=True) if given[k] != wanted[k]]
    if missing or extra or shapes:
        raise ClusterError(
            "the saved training state is of another model: "
            f"missing {missing[:5] or 'nothing'}, not expected {extra[:5] or 'nothing'}, "
            f"shapes {shapes[:5] or 'equal'}; "
            "resume with the settings that it was saved under, or start anew in another folder"
        )
