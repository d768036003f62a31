"""The torch process group of a training group, on the one network interface that the Ray cluster uses.

Torch's own rendezvous store listens on every interface of the machine, without authentication, and gloo and NCCL choose
an interface by themselves. Here all of them use the interface of rank 0's address in the Ray cluster, which is loopback
for an embedded one. `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` of the user's own are kept.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

_store: Any = None  # of rank 0: the server lives as long as this object


@dataclass
class ProcessGroupConfig(TorchConfig):
    """How Ray Train makes the group: `backend` is gloo or nccl."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _ProcessGroup


class _ProcessGroup(Backend):
    share_cuda_visible_devices = True  # every rank sees its machine's GPUs, and takes the one of its local rank

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, _open_store)
        worker_group.execute(_join, address, port, backend_config.backend, backend_config.timeout_s)


def _open_store() -> tuple[str, int]:
    """Start the rendezvous store on this node's address in the Ray cluster, and nowhere else; where it listens."""
    import ray.util
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    global _store
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    _store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return address, port


def _join(address: str, port: int, backend: str, timeout_s: float) -> None:
    import ray.train
    import ray.util
    from torch import distributed

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    if (interface := interface_of(ray.util.get_node_ip_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    timeout = timedelta(seconds=timeout_s)
    store = _store or distributed.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def interface_of(address: str) -> str | None:
    """The name of the network interface with this IP address; None if this machine has none."""
    import psutil

    found: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in found.items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None
