"""Run many independent work items on a pool of Ray actors, and lose none of them.

A worker that dies (kill -9, out of memory, a node lost) is replaced, and the items it held are done again elsewhere.
An item may therefore run more than once and must be idempotent; its result is delivered exactly once. Only a bounded
number of items is in flight, so neither items nor results pile up in the object store.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from cluster.errors import ClusterError, is_retryable

ITEMS_AT_ONCE = 2  # handed to an actor at a time: hides the round trip
LOOK_AROUND_SECONDS = 10.0  # between two looks at whether the cluster still has a node for a worker that waits

Item = TypeVar("Item")
Result = TypeVar("Result")
Item_contra = TypeVar("Item_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class Worker(Protocol[Item_contra, Result_co]):
    """What each actor of a pool holds: made once (the expensive part: loading a model), then given item after item."""

    def run(self, item: Item_contra) -> Result_co:
        """Do one item. The result must be small and picklable: data goes to disk."""
        ...


def plain(text: str) -> str:
    """Ray's error text without its terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class WorkItemFailed(RuntimeError):
    """A work item that could not be done. `__cause__` is the worker's exception where there was one."""

    def __init__(self, item: str, attempts: int, detail: str) -> None:
        self.item = item
        self.attempts = attempts
        self.detail = detail = plain(detail)
        times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        super().__init__(f"work item {item} failed after {times}; the worker said:\n{detail}")


class WorkersFailed(RuntimeError):
    """No worker could be started. `__cause__` is the exception that the worker met, where there was one."""


@dataclass(kw_only=True)
class PoolSummary:
    """What it took: items done, attempts repeated, workers lost."""

    items: int = 0
    repeated: int = 0
    workers_lost: int = 0


def run_work_items(
    make_worker: Callable[[], Worker[Item, Result]],
    items: Iterable[Item],
    *,
    num_workers: int,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    max_retries: int = 3,
    on_result: Callable[[Item, Result], None],
    item_name: Callable[[Item], str] = str,
) -> PoolSummary:
    """Do all `items` on up to `num_workers` actors of the current Ray session.

    Args:
        make_worker: picklable factory, called once in each actor.
        items: picklable and small; pulled as they are needed.
        cpus_per_worker, gpus_per_worker: Ray resources of an actor (torch gets as many threads as CPUs, at least one).
        max_retries: how often an item is tried again after its first failure. A worker's death counts against an item
            only if it was the one unfinished item there.
        on_result: called in this process once for each item, in the order in which they finish.
        item_name: how an item is called in errors.

    Raises:
        WorkItemFailed: an item failed for good. What is already done has been delivered.
        WorkersFailed: a worker met an error that is not retryable (`cluster.errors`) when it started, or they fail to,
            `max_retries` + 1 times in a row.
        ClusterError: no node of the cluster has, or has any more, the resources of one worker.
    """
    if num_workers < 1 or max_retries < 0:
        raise ClusterError(f"num_workers={num_workers} must be at least 1, max_retries={max_retries} at least 0")
    _require_room(cpus_per_worker, gpus_per_worker)
    pool: _Pool[Item, Result] = _Pool(
        make_worker=make_worker,
        source=iter(items),
        options={"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker, "max_restarts": 0, "max_task_retries": 0},
        max_retries=max_retries,
        on_result=on_result,
        item_name=item_name,
    )
    try:
        return pool.run(num_workers)
    finally:
        pool.close()


class _Host:
    """The actor: holds one worker. It is made in a call: an actor whose constructor fails has no error to show."""

    def start(self, make_worker: Callable[[], Worker[Any, Any]]) -> None:
        self._worker = make_worker()

    def run(self, item: Any) -> Any:
        return self._worker.run(item)


@dataclass(kw_only=True, eq=False)
class _Job(Generic[Item]):
    """An item on its way. One that was with others on a worker that died goes `alone` next: the guilty one is found."""

    item: Item
    failures: int = 0
    alone: bool = False


@dataclass(kw_only=True, eq=False)
class _Seat(Generic[Item]):
    """One actor, the reference that says it has started, and the jobs it holds, oldest first."""

    actor: Any
    starting: Any
    jobs: dict[Any, _Job[Item]] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Pool(Generic[Item, Result]):
    make_worker: Callable[[], Worker[Item, Result]]
    source: Any
    options: dict[str, Any]
    max_retries: int
    on_result: Callable[[Item, Result], None]
    item_name: Callable[[Item], str]
    waiting: deque[_Job[Item]] = field(default_factory=deque)
    seats: list[_Seat[Item]] = field(default_factory=list)
    failed_starts: int = 0
    summary: PoolSummary = field(default_factory=PoolSummary)

    def run(self, num_workers: int) -> PoolSummary:
        import ray

        while True:
            while len(self.seats) < num_workers and self._fill(len(self.seats) + 1):
                self._hire()
            if not self._fill(1):
                return self.summary
            for seat in self.seats:
                self._feed(seat)
            pending = {ref: seat for seat in self.seats for ref in (seat.jobs or [seat.starting]) if ref is not None}
            done, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK_AROUND_SECONDS)
            for ref in done:
                self._settle(pending[ref], ref)
            if not done and all(seat.starting is not None for seat in self.seats):
                _require_room(self.options["num_cpus"], self.options["num_gpus"])

    def _fill(self, wanted: int) -> bool:
        """Whether at least `wanted` jobs are waiting or in flight, pulling from the source as needed."""
        held = sum(len(seat.jobs) for seat in self.seats)
        while held + len(self.waiting) < wanted:
            try:
                self.waiting.append(_Job(item=next(self.source)))
            except StopIteration:
                return False
        return True

    def _hire(self) -> None:
        import ray

        actor: Any = ray.remote(_Host).options(**self.options).remote()
        self.seats.append(_Seat(actor=actor, starting=actor.start.remote(self.make_worker)))

    def _feed(self, seat: _Seat[Item]) -> None:
        if seat.starting is not None:
            return
        while len(seat.jobs) < ITEMS_AT_ONCE:
            if not self.waiting:
                try:
                    self.waiting.append(_Job(item=next(self.source)))
                except StopIteration:
                    return
            if seat.jobs and (self.waiting[0].alone or any(job.alone for job in seat.jobs.values())):
                return
            job = self.waiting.popleft()
            seat.jobs[seat.actor.run.remote(job.item)] = job

    def _settle(self, seat: _Seat[Item], ref: Any) -> None:
        """Take what became of `ref`: a start, a result, an item's failure or the loss of the worker."""
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            value = ray.get(ref)
        except RayActorError as error:
            self._replace(seat, str(error))
        except RayTaskError as error:
            if ref == seat.starting:
                self._replace(seat, str(error), error.cause)
            else:
                self._failed(seat.jobs.pop(ref), str(error), error.cause)
        except RayError as error:
            self._replace(seat, f"{type(error).__name__}: {error}")
        else:
            if ref == seat.starting:
                seat.starting = None
                self.failed_starts = 0
            else:
                self._done(seat.jobs.pop(ref), value)

    def _done(self, job: _Job[Item], value: Result) -> None:
        self.summary.items += 1
        self.on_result(job.item, value)

    def _failed(self, job: _Job[Item], detail: str, cause: BaseException | None) -> None:
        job.failures += 1
        if job.failures > self.max_retries or (cause is not None and not is_retryable(cause)):
            raise WorkItemFailed(self.item_name(job.item), job.failures, detail) from cause
        self._again(job)

    def _again(self, job: _Job[Item]) -> None:
        self.summary.repeated += 1
        self.waiting.appendleft(job)

    def _replace(self, seat: _Seat[Item], detail: str, cause: BaseException | None = None) -> None:
        """Give up a lost worker's seat, which the loop fills again; deliver what it had done, take back the rest."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        self.seats.remove(seat)
        ray.kill(seat.actor)
        if seat.starting is not None:
            self.failed_starts += 1
            if self.failed_starts > self.max_retries or (cause is not None and not is_retryable(cause)):
                times = "" if self.failed_starts == 1 else f", {self.failed_starts} times in a row"
                raise WorkersFailed(f"workers fail while they start{times}:\n{plain(detail)}") from cause
            return
        self.summary.workers_lost += 1
        unfinished: list[_Job[Item]] = []
        for ref, job in seat.jobs.items():
            try:
                value = ray.get(ref, timeout=60)
            except RayTaskError as error:
                self._failed(job, str(error), error.cause)
            except RayError:
                unfinished.append(job)
            else:
                self._done(job, value)
        reason = f"the worker died: {detail}"
        if len(unfinished) == 1:
            self._failed(unfinished[0], reason, None)
            return
        for job in reversed(unfinished):  # any of them may have done it: the next time each is alone
            job.alone = True
            self._again(job)

    def close(self) -> None:
        import ray

        if ray.is_initialized():
            for seat in self.seats:
                ray.kill(seat.actor)


def _require_room(cpus: float, gpus: float) -> None:
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        return
    most = [(node.get("CPU", 0), node.get("GPU", 0)) for node in nodes]
    raise ClusterError(
        f"a worker wants {cpus:g} CPUs and {gpus:g} GPUs, and no node of the Ray cluster has them "
        f"(CPUs, GPUs of the nodes: {most}); lower cpus_per_worker or gpus_per_worker, or add a node"
    )
