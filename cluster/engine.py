"""A DeepSpeed engine that takes exact steps, however the global batch is split.

The caller's loss is already divided by the normaliser of the *global* batch (the sum of the loss weights over all ranks
and micro-batches), so the gradients of all micro-batches of all ranks are summed, never averaged. Any number of
micro-batches makes a step, and ranks may have different numbers of them, none included.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.engine_settings import DeepSpeedSettings
from cluster.engine_state import gather_state, restore_state
from cluster.errors import ClusterError

if TYPE_CHECKING:
    import torch

MicroBatch = TypeVar("MicroBatch")
UNTRACKED_BYTES = 2**28  # of a process with torch that malloc does not know of, about


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `loss` is the sum over all micro-batches and ranks; a skipped step changed nothing."""

    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: bool


class TrainEngine:
    """A module under DeepSpeed. Every method is called by all ranks together."""

    def __init__(self, engine: Any, module: torch.nn.Module, settings: DeepSpeedSettings, total_steps: int) -> None:
        self.deepspeed = engine
        self.module = module
        self.settings = settings
        self.total_steps = total_steps
        self.names = {name: p for name, p in module.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.deepspeed.device
        return device

    @property
    def rank(self) -> int:
        return int(self.deepspeed.global_rank)

    @property
    def world_size(self) -> int:
        return int(self.deepspeed.world_size)

    def train_step(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        loss_of: Callable[[MicroBatch], torch.Tensor] | None = None,
        *,
        dummy_loss: Callable[[], torch.Tensor] | None = None,
    ) -> StepResult:
        """One optimizer step over this rank's `micro_batches`.

        Args:
            step: 0-based number of the step; it alone decides the learning rate.
            micro_batches: this rank's share, possibly empty.
            loss_of: the scalar loss of a micro-batch, divided by the global normaliser. None calls the module itself.
                ZeRO stage 3 needs a call of `deepspeed`, whose hooks gather the parameters.
            dummy_loss: from ZeRO stage 2 on, any loss that went through the module, for a rank with fewer micro-batches
                than another: all of them have to gather parameters, and to reduce gradients, equally often and in the
                same order. It counts nothing.

        Raises:
            ClusterError: from ZeRO stage 2 on, ranks have different numbers of micro-batches, and no `dummy_loss`.
        """
        import torch

        compute = loss_of or self.deepspeed
        stage = self.settings.zero_stage
        rounds = len(micro_batches) if stage < 2 else self._most(len(micro_batches))
        if stage >= 2 and len(micro_batches) < max(1, rounds) and dummy_loss is None:
            raise ClusterError(
                f"at zero_stage = {stage} a rank with {len(micro_batches)} micro-batches, where another has {rounds}, "
                "needs a `dummy_loss`: any loss that goes through the module"
            )
        learning_rate = self.settings.learning_rate_at(step, self.total_steps)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        total = torch.zeros((), dtype=torch.float64)
        for index in range(max(1, rounds)):
            if index < len(micro_batches):
                loss = compute(micro_batches[index])
                total += loss.detach().double().cpu()
            else:
                loss = dummy_loss() * 0.0 if stage >= 2 and dummy_loss is not None else None
            if index == 0 and stage < 3:
                loss = self._nothing() if loss is None else loss + self._nothing()
            # DeepSpeed divides by the number of ranks; the sum over micro-batches is as it is.
            self.deepspeed.backward(loss * self.world_size, scale_wrt_gas=False)
            del loss
            if self.device.type == "cpu":
                release_freed_memory()
        before = self.deepspeed.skipped_steps
        self.deepspeed.step()
        norm = self.deepspeed.get_global_grad_norm()
        return StepResult(
            loss=self._sum(total),
            gradient_norm=math.nan if norm is None else float(norm),
            learning_rate=learning_rate,
            skipped=self.deepspeed.skipped_steps > before,
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state in fp32 on the CPU of rank 0 (other ranks: empty), whatever ranks and stage.

        Keys are `weight/NAME` and `KEY/NAME` for each key of the optimizer's state, trainable parameters only. Any
        engine over the same parameters with the same kind of optimizer can `load` it.
        """
        return gather_state(self.deepspeed, self.names)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned; every rank passes all of it.

        Raises:
            ClusterError: names or shapes differ from this engine's parameters.
        """
        restore_state(self.deepspeed, self.names, state)

    def weights(self) -> dict[str, torch.Tensor]:
        """The trainable weights alone, as `weight/NAME`: fp32 on rank 0, empty elsewhere."""
        return gather_state(self.deepspeed, self.names, weights_only=True)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block every parameter of the module is whole on every rank, at ZeRO stage 3 too; only to read."""
        if self.settings.zero_stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            yield

    def agree(self, wanted: bool) -> bool:
        """Whether any rank wants it: for decisions that all must take at the same step, such as stopping."""
        return self._most(int(wanted)) > 0

    def _nothing(self) -> torch.Tensor:
        """Zero, with a zero gradient for every parameter: no rank waits for a gradient that another does not have."""
        import torch

        return torch.stack([(p.reshape(-1)[:1] * 0.0).sum() for p in self.names.values()]).sum()

    def _most(self, count: int) -> int:
        import torch
        import torch.distributed as dist

        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def _sum(self, value: torch.Tensor) -> float:
        import torch.distributed as dist

        value = value.to(self.device)
        dist.all_reduce(value)
        return float(value)


def build_engine(
    module: torch.nn.Module,
    settings: DeepSpeedSettings,
    total_steps: int,
    *,
    groups: Sequence[Mapping[str, Any]] | None = None,
) -> TrainEngine:
    """Put `module` under DeepSpeed in the current process group (one is made for a lone process).

    Only parameters that require a gradient reach the optimizer, so frozen ones are neither sharded nor given state.

    Args:
        total_steps: the length of the learning-rate schedule.
        groups: parameter groups with options of their own (`lr_scale`, `weight_decay`); None makes one group.

    Raises:
        ClusterError: nothing is trainable, or `groups` leave a trainable parameter out.
    """
    deepspeed = _import_deepspeed()
    _ensure_process_group()
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise ClusterError("no parameter of the module requires a gradient: there is nothing to train")
    wanted = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups or ()]
    wanted = wanted or [{"params": trainable}]
    if {id(p) for group in wanted for p in group["params"]} != {id(p) for p in trainable}:
        raise ClusterError("the parameter groups must hold every trainable parameter exactly once")
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=settings.make_optimizer([group for group in wanted if group["params"]]),
        config=settings.to_json(),
        dist_init_required=False,
    )
    return TrainEngine(engine, module, settings, total_steps)


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def release_freed_memory(beyond: int = 2**29) -> None:
    """Give freed pages back to the system once more than `beyond` bytes of them are held; where the C library can.

    Micro-batches differ in size, so the activations of one leave holes that do not fit those of the next: without this,
    a process that trains on a CPU grows by a third. Pages given back cost time when they are needed again.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return
    library.mallinfo2.restype = _MallocInfo
    info = library.mallinfo2()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident - info.uordblks - info.hblkhd > beyond + UNTRACKED_BYTES:
        library.malloc_trim(0)


def _import_deepspeed() -> Any:
    import torch

    os.environ.setdefault("DS_BUILD_OPS", "0")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    # Its first collective on a CPU would compile a shared-memory kernel for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _ensure_process_group() -> None:
    import deepspeed.comm
    import torch
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
