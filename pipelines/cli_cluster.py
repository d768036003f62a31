"""Commands that send a run to a Ray cluster and follow it there."""

from __future__ import annotations

import json
from typing import Annotated

import typer

AddressOption = Annotated[
    str, typer.Option("--address", envvar="RAY_JOBS_ADDRESS", help="The head's job server, e.g. http://host:8265.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The id that `dspark submit` printed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands on the main command."""
    for command in (submit, status, logs, stop):
        app.command()(command)


def _address(given: str) -> str:
    from pipelines.errors import UserError

    if not given:
        raise UserError("which cluster? add --address http://HOST:8265, or set RAY_JOBS_ADDRESS")
    return given


def submit(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A settings file inside the working directory.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    address: AddressOption = "",
    follow: Annotated[bool, typer.Option("--follow", help="Print the log until the job ends.")] = False,
    redo: Annotated[bool, typer.Option("--redo")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send `dspark run CONFIG` to a Ray cluster; prints the job's id."""
    head = _address(address)
    from pipelines.submission import submit_run

    job = submit_run(config, overrides or [], head, redo=redo)
    print(json.dumps({"job": job}) if as_json else job)
    if follow:
        logs(job, address=head, follow=True)


def status(job: JobArgument, address: AddressOption = "", as_json: JsonOption = False) -> None:
    """Whether a submitted run is waiting, running, done or failed."""
    head = _address(address)
    from cluster import jobs

    state = jobs.status(job, address=head)
    print(json.dumps({"job": job, "status": str(state)}) if as_json else state)


def logs(
    job: JobArgument,
    address: AddressOption = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """The log of a submitted run."""
    head = _address(address)
    from cluster import jobs

    for piece in jobs.logs(job, address=head, follow=follow):
        print(piece, end="", flush=True)


def stop(job: JobArgument, address: AddressOption = "") -> None:
    """Stop a submitted run; what is complete stays, and submitting it again goes on."""
    head = _address(address)
    from cluster import jobs

    jobs.stop(job, address=head)
