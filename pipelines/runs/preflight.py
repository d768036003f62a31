"""What is known before a run starts to be unable to work, refused then and not after hours.

Nothing here writes: a run that is refused leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.session import inside_ray_job
from dspark.decoding.target_checks import require_decoder, require_device
from pipelines.errors import UserError
from pipelines.stages.train import cpus_per_rank
from pipelines.submission import require_variables
from pipelines.target_spec import resolve_target
from pipelines.training.model import require_drafter

if TYPE_CHECKING:
    from pipelines.runs.run import Run
    from pipelines.settings import Settings
    from pipelines.target_spec import TargetSpec

Resources = Mapping[str, float]  # of a node, as Ray names them: CPU, GPU


def check_start(run: Run, names: Sequence[str], *, redo: bool) -> None:
    """Raises UserError for what a stage or its workers could not do, and for places and inputs that are not theirs."""
    if inside_ray_job():
        require_variables(run.settings.cluster.env_vars)
    for name in names:
        if (check := getattr(run.stages[name].load(), "check", None)) is not None:
            check(run.settings)
    run.refuse_foreign_files(names)
    run.refuse_damaged([*names, *(needed for name in names for needed in run.stages[name].inputs)])
    if not redo:
        run.refuse_other_identities(names)
    for name in names:
        for needed in run.stages[name].inputs:
            if needed not in names:
                run.require(needed, needed_by=name)
    if left := stages_left(run, names):
        check_workers(run.settings, left)


def stages_left(run: Run, names: Sequence[str]) -> list[str]:
    """Those whose workers still have something to do."""
    return [name for name in names if run.stages[name].on_ray and not run.is_complete(name)]


def check_workers(settings: Settings, stages: Sequence[str]) -> None:
    """Raises for what no worker could do.

    That is a drafter that the target cannot have, an attention that it lacks, machines without room or GPU.
    """
    spec = resolve_target(settings)
    require_drafter(settings, spec)
    own = _starts_a_cluster(settings)
    # The driver of a cluster need not have what its workers have.
    if own or not settings.target.attn_implementation.startswith("flash"):
        _require_attention(settings, spec)
    if own:
        require_device(settings.target.device)
        require_room(settings, stages, [_this_machine(settings)])


def require_room(settings: Settings, stages: Sequence[str], nodes: Sequence[Resources] | None = None) -> None:
    """Raises UserError unless a worker of each of these stages, and the training group, has room.

    Args:
        nodes: what each node has; None asks the Ray session that is running.
    """
    if nodes is None:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cluster, train = settings.cluster, settings.train
    found = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
    if not _count(nodes, cluster.cpus_per_worker, cluster.gpus_per_worker):
        raise UserError(
            f"a worker wants cluster.cpus_per_worker={cluster.cpus_per_worker} CPUs and "
            f"cluster.gpus_per_worker={cluster.gpus_per_worker:g} GPUs, and no machine has them (there: {found}); "
            "lower these settings, raise cluster.num_cpus or cluster.num_gpus, or join a larger cluster "
            "(cluster.address)"
        )
    if not {"train", "pilot"} & set(stages):
        return

    cpus, gpus = cpus_per_rank(settings), 1 if cluster.gpus_per_worker > 0 else 0
    fewest = train.num_workers if train.min_workers is None else train.min_workers
    if (room := _count(nodes, cpus, gpus)) < fewest:
        option = "num_workers" if train.min_workers is None else "min_workers"
        raise UserError(
            f"train.{option}={fewest} want {cpus:g} CPUs and {gpus} GPUs each, and there is room for {room} "
            f"(there: {found}); lower train.{option} or cluster.cpus_per_worker, or join a larger cluster "
            "(cluster.address)"
        )


def _count(nodes: Sequence[Resources], cpus: float, gpus: float) -> int:
    """How many workers of this size the nodes have room for; shares of a CPU add up with rounding."""
    sizes = {"CPU": cpus, "GPU": gpus}
    return sum(min(int(node.get(kind, 0) / size + 1e-6) for kind, size in sizes.items() if size > 0) for node in nodes)


def _starts_a_cluster(settings: Settings) -> bool:
    """Whether the run will have a cluster of its own, on this machine."""
    ray = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized()
    return settings.cluster.address is None and not inside_ray_job() and not joined


def _this_machine(settings: Settings) -> dict[str, float]:
    import torch

    cluster = settings.cluster
    gpus = torch.cuda.device_count() if cluster.num_gpus is None else cluster.num_gpus
    return {"CPU": cluster.num_cpus or os.cpu_count() or 1, "GPU": gpus}


def _require_attention(settings: Settings, spec: TargetSpec) -> None:
    from transformers import AutoConfig

    if not settings.target.trust_remote_code and settings.target.attn_implementation != "eager":
        require_decoder(AutoConfig.from_pretrained(spec.path), spec.name, settings.target.attn_implementation)
