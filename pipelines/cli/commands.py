"""The `dspark` command. It imports nothing heavy until a command needs it; a user's mistake exits with code 2.

`dspark run CONFIG` does every stage that is not done yet. Each stage, the tools on caches, and the cluster have their
own commands (`cache`, `tools`, `cluster`).
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from typer._click.exceptions import ClickException  # typer has no public name for it

from pipelines import provenance
from pipelines.cli import cache, cluster, tools
from pipelines.cli.tools import ConfigArgument, JsonOption, OverridesArgument, accepted_lengths_text
from pipelines.errors import USER_ERRORS, for_the_user
from pipelines.progress import Reporter, duration
from storage.files.masking import mask

if TYPE_CHECKING:
    from pipelines.runs.executor import Outcome
    from pipelines.settings import Settings

RedoOption = Annotated[
    bool, typer.Option("--redo", help="Move outputs made with other settings to replaced/ and make them anew.")
]

app = typer.Typer(
    cls=tools.Commands,
    name="dspark",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("dspark"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train, calibrate, measure and publish speculative-decoding drafters."""


@app.command()
def run(
    config: ConfigArgument, overrides: OverridesArgument = None, redo: RedoOption = False, as_json: JsonOption = False
) -> None:
    """Do every stage that is not done yet, from prompts to a published drafter with its report."""
    _run_stages(config, overrides, None, redo=redo, as_json=as_json)


def _add_stage_command(name: str, summary: str) -> None:
    def command(
        config: ConfigArgument,
        overrides: OverridesArgument = None,
        redo: RedoOption = False,
        as_json: JsonOption = False,
    ) -> None:
        _run_stages(config, overrides, [name], redo=redo, as_json=as_json)

    command.__doc__ = summary
    app.command(name)(command)


_add_stage_command("regenerate", "Let the target write its own answers to the training prompts.")
_add_stage_command("pilot", "Train a short pilot on a few conversations and choose what the cache keeps.")


@cache.cache_app.command("build")
def build_cache(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    redo: RedoOption = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Check every byte of a finished cache, and build again what is damaged.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the target cache (`dspark cache CONFIG` for short)."""
    if repair:
        from pipelines.runs.run import Run
        from pipelines.settings import load_settings
        from pipelines.stages.build_cache import take_out_damage

        take_out_damage(Run(load_settings(config, overrides or [])), Reporter())
    _run_stages(config, overrides, ["pilot", "cache"], redo=redo, as_json=as_json)


app.add_typer(cache.cache_app, name="cache")
_add_stage_command("train", "Train the drafter on the target cache.")
_add_stage_command("calibrate", "Fit the confidence temperatures on the calibration prompts.")
_add_stage_command("evaluate", "Measure accepted length on the evaluation prompts.")
_add_stage_command("publish", "Write the published checkpoint, and upload it where asked.")
tools.add_commands(app)
cluster.add_commands(app)


@app.command()
def refit(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    drafter: Annotated[str, typer.Option("--from", help="Folder of the published drafter to start from.")] = "",
    redo: RedoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fit a published drafter to other prompts or another thinking mode, and evaluate it beside the old one."""
    from pipelines.refit import refit_settings

    _execute(refit_settings(config, overrides or [], drafter or None), None, redo=redo, as_json=as_json)


def _run_stages(
    config: str, overrides: list[str] | None, only: Sequence[str] | None, *, redo: bool, as_json: bool
) -> None:
    from pipelines.settings import load_settings

    _execute(load_settings(config, overrides or []), only, redo=redo, as_json=as_json)


def _execute(settings: Settings, only: Sequence[str] | None, *, redo: bool, as_json: bool) -> None:
    from pipelines.runs.executor import run_stages

    origin = provenance.collect(settings.run.seed)
    with for_the_user(settings.run.directory):
        outcomes = run_stages(settings, Reporter(), only=only, redo=redo, provenance=origin)
    if as_json:
        stages = [vars(outcome) for outcome in outcomes]
        print(json.dumps({"directory": settings.run.directory, "stages": stages}, indent=2))
    else:
        _print_outcomes(outcomes)


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        took = f"in {duration(outcome.seconds)}" if outcome.state == "done" else "already"
        print(f"{outcome.stage:<11} done {took:<10} {outcome.output}")
    by_stage = {outcome.stage: outcome for outcome in outcomes}
    if "evaluate" in by_stage:
        print("\n" + accepted_lengths_text(by_stage["evaluate"].result))
    if "report" in by_stage:
        print(f"\nReport: {by_stage['report'].output}/index.html")
    if "publish" in by_stage:
        print(f"Drafter: {by_stage['publish'].output}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: exit code 0, 2 for a user's mistake (one message), 1 for a fault of ours.

    Ctrl-C and SIGTERM end whatever runs in order, with exit code 130 and 143.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is no reason to fail
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' bars are noise in a log
    with _stopping_in_order() as received:
        try:
            code = _call(sys.argv[1:] if arguments is None else list(arguments))
            sys.stdout.flush()
        except KeyboardInterrupt as stop:
            print(*(stop.args or ["stopped; the same command goes on from here"]), file=sys.stderr)
            raise SystemExit(128 + (received[0] if received else signal.SIGINT)) from None
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader went away; nothing is left to flush to
            raise SystemExit(0) from None
        except Exception as error:
            if os.environ.get("DSPARK_TRACEBACK") or not isinstance(error, USER_ERRORS):
                print(mask(traceback.format_exc()), end="", file=sys.stderr)
                raise SystemExit(1) from None
            print(f"dspark: {mask(str(error))}", file=sys.stderr)
            raise SystemExit(2) from None
    raise SystemExit(code)


def _call(arguments: list[str]) -> int:
    """Do the command; its exit code. Typer's own entry point would swallow an interrupt and a closed pipe."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("dspark", arguments) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except ClickException as problem:
        problem.show()
        return problem.exit_code
    return 0


@contextmanager
def _stopping_in_order() -> Iterator[list[int]]:
    """Let SIGTERM interrupt as Ctrl-C does; yields the numbers of the signals that have arrived.

    KeyboardInterrupt is the one exception that comes out of every wait, Ray's among them, as it went in.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
