"""Commands that send a run to a Ray cluster and follow it there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from urllib.parse import urlsplit

import typer

from pipelines.cli.tools import JsonOption
from pipelines.errors import UserError
from storage.files import masking

AddressOption = Annotated[
    str, typer.Option("--address", envvar="RAY_JOBS_ADDRESS", help="The head's job server, e.g. http://host:8265.")
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The id that `dspark submit` printed.")]


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands on the main command."""
    for command in (submit, status, logs, stop):
        app.command()(command)


def _address(given: str) -> str:
    if not given.strip():
        raise UserError("which cluster? add --address http://HOST:8265, or set RAY_JOBS_ADDRESS")
    if masking.find(given):
        raise UserError(
            f"--address {masking.mask(given)!r} holds a password: a head asks for a token, which RAY_AUTH_TOKEN_PATH "
            "(or RAY_AUTH_TOKEN) gives; leave it out of the address"
        )
    address = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(address)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:  # a port that is no number, or out of range
        whole = False
    if not whole:
        raise UserError(f"--address {given!r} is not the address of a head's job server; expected http://HOST:8265")
    return address


def _job(given: str) -> str:
    """The id, as it can stand in the head's addresses."""
    if not re.fullmatch(r"[\w.-]+", given):
        raise UserError(f"{given!r} is not a job's id: it is what `dspark submit` printed, such as dspark-0123456789ab")
    return given


@contextmanager
def _interrupted(text: str) -> Iterator[None]:
    """What Ctrl-C has stopped here, and how it stands with the job, which it does not reach."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(text) from None


def submit(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A settings file inside the working directory.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    address: AddressOption = "",
    follow: Annotated[bool, typer.Option("--follow", help="Print the log until the job ends.")] = False,
    refit: Annotated[
        str, typer.Option("--from", help="Re-fit this published drafter (`dspark refit`) and not `dspark run`.")
    ] = "",
    redo: Annotated[bool, typer.Option("--redo", help="As for `dspark run`.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send `dspark run CONFIG` to a Ray cluster; prints the job's id."""
    head = _address(address)
    from cluster import jobs
    from pipelines.submission import submit_run

    job = jobs.new_id()
    with _interrupted(f"interrupted while submitting: `dspark status {job}` says whether the job has arrived"):
        submit_run(
            config,
            overrides or [],
            head,
            job=job,
            redo=redo,
            refit=refit or None,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    print(json.dumps({"job": job}) if as_json else job, flush=True)
    if follow:
        logs(job, address=head, follow=True)


def status(job: JobArgument, address: AddressOption = "", as_json: JsonOption = False) -> None:
    """Whether a submitted run is waiting, running, done or failed."""
    job, head = _job(job), _address(address)
    from cluster import jobs

    with _interrupted("interrupted; the job is as it was"):
        state, message = jobs.status(job, address=head), jobs.message(job, address=head)
    if as_json:
        print(json.dumps({"job": job, "status": state, "message": message}))
    else:
        print(f"{state}: {message}" if message else state)


def logs(
    job: JobArgument,
    address: AddressOption = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """The log of a submitted run; with --follow, exit code 1 if it did not succeed."""
    job, head = _job(job), _address(address)
    from cluster import jobs

    with _interrupted(
        f"the log is no longer followed; the job goes on (`dspark logs {job} --follow` follows it, `dspark stop {job}` "
        "ends it)"
    ):
        for piece in jobs.logs(job, address=head, follow=follow):
            print(piece, end="", flush=True)
    if follow and (state := jobs.status(job, address=head)) != "SUCCEEDED":
        print(f"the job is {state}: {jobs.message(job, address=head)}", file=sys.stderr)
        raise typer.Exit(1)


def stop(job: JobArgument, address: AddressOption = "") -> None:
    """Stop a submitted run; what is complete stays, and submitting it again goes on."""
    job, head = _job(job), _address(address)
    from cluster import jobs

    with _interrupted(f"interrupted; `dspark status {job}` says whether the job was stopped"):
        stopping = jobs.stop(job, address=head)
    if stopping:
        print("stopping; submit the same run again to go on")
    else:
        print(f"it had ended already: {jobs.status(job, address=head)}")
