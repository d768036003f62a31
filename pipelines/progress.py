"""What is being done, how much, how fast, and how long it will take: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0  # between two plain lines of one task


class Task:
    """One piece of work with a known or unknown total. `figures` are shown beside it, such as `loss=1.23`."""

    def __init__(self, reporter: Reporter, what: str, total: float | None, unit: str, done: float) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = self._start_done = done
        self.figures: dict[str, str] = {}
        self._reporter = reporter
        self._started = self.shown = time.monotonic()  # shown: when its last line was written
        self.bar: TaskID | None = None  # on a terminal

    def advance(self, amount: float = 1, **figures: float | str) -> None:
        """Count `amount` more units as done."""
        self._note(self.done + amount, figures)

    def update(self, done: float, *, total: float | None = None, **figures: float | str) -> None:
        """Set what is done so far, and the total if it is known by now."""
        if total is not None:
            self.total = total
        self._note(done, figures)

    def _note(self, done: float, figures: Mapping[str, float | str]) -> None:
        self.done = done
        self.figures.update({name: _figure(value) for name, value in figures.items()})
        self._reporter._show(self)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def speed(self) -> float:
        """Units a second since this process began; what an earlier one did is not counted."""
        return (self.done - self._start_done) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        if self.total is None or self.speed <= 0:
            return None
        return max(self.total - self.done, 0.0) / self.speed

    def line(self) -> str:
        """`decode: 120/576 prompts (21%), 3.4 prompts/s, 2m14s left, loss=1.2`."""
        amount = f"{_count(self.done)} {self.unit}"
        if self.total:
            share = 100 * self.done / self.total
            amount = f"{_count(self.done)}/{_count(self.total)} {self.unit} ({share:.0f}%)"
        parts = [amount]
        if self.speed > 0:
            parts.append(f"{_count(self.speed)} {self.unit}/s")
        left = self.seconds_left
        if left is not None and self.done < (self.total or 0):
            parts.append(f"{duration(left)} left")
        parts += [f"{name}={value}" for name, value in self.figures.items()]
        return f"{self.what}: {', '.join(parts)}"


class Reporter:
    """Where a stage says what it does. Silent when `quiet`; standard output stays free for `--json`."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, terminal: bool | None = None) -> None:
        self.quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._bars: Progress | None = None

    def say(self, text: str) -> None:
        """One line for the reader."""
        if self.quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage, and say how long it took."""
        started = time.monotonic()
        self.say(f"== {name}")
        yield
        self.say(f"== {name}: done in {duration(time.monotonic() - started)}")

    @contextmanager
    def task(self, what: str, total: float | None = None, unit: str = "samples", done: float = 0) -> Iterator[Task]:
        """A piece of work; `done` is what an earlier process had finished."""
        task = Task(self, what, total, unit, done)
        if self._terminal and not self.quiet:
            if self._bars is None:
                self._bars = _make_bars(self._stream)
                self._bars.start()
            task.bar = self._bars.add_task(what, total=total, text="")
            self._show(task)
        ended = False
        try:
            yield task
            ended = True
        finally:
            if self._bars is not None and task.bar is not None:
                self._bars.remove_task(task.bar)
                if not self._bars.tasks:
                    self._bars.stop()
                    self._bars = None
            if ended or task.done > done:  # not of a piece of work that failed before anything was done
                self.say(f"{task.line()}, took {duration(task.seconds)}")

    def _show(self, task: Task) -> None:
        if self._bars is not None and task.bar is not None:
            text = task.line().removeprefix(f"{task.what}: ")
            self._bars.update(task.bar, completed=task.done, total=task.total, text=text)
        elif time.monotonic() - task.shown >= LINE_SECONDS:
            task.shown = time.monotonic()
            self.say(task.line())


def _make_bars(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
    return Progress(*columns, console=Console(file=stream), refresh_per_second=4)


def duration(seconds: float) -> str:
    """`4.2s`, `3m05s`, `2h10m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def byte_size(count: float) -> str:
    """`512 B`, `1.5 MB`, `38 TB` (powers of 1000)."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 1000:
            return f"{count:.3g} {unit}"
    return f"{count:,.0f} TB"


def flatten(values: Mapping[str, Any], joint: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, names joined."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, joint, f"{prefix}{name}{joint}")
        else:
            yield f"{prefix}{name}", value


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or float(value).is_integer() else f"{value:.3g}"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
