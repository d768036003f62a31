"""`dspark submit`: the same run on a Ray cluster, as a Ray job.

The settings are checked here before anything is sent. A relative `run.directory` would end with the job's own working
folder, so it is sent as the absolute path: it has to be on a file system that the cluster sees.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipelines.errors import UserError
from pipelines.settings import Settings, load_settings


def submit_run(
    config: str, overrides: Sequence[str], address: str, *, redo: bool = False, refit: str | None = None
) -> str:
    """Submit `dspark run`, or `dspark refit --from` the folder `refit`; returns the job's id.

    Raises UserError for settings that would not run, and JobError when no head answers.
    """
    from cluster import jobs

    settings = load_settings(config, overrides)
    working_dir = Path(settings.cluster.working_dir).resolve()
    return jobs.submit(
        job_command(config, overrides, settings, working_dir, redo=redo, refit=refit),
        address=address,
        working_dir=working_dir,
        env_vars={"DSPARK_HOME": os.environ.get("DSPARK_HOME") or os.getcwd()},
    )


def job_command(
    config: str,
    overrides: Sequence[str],
    settings: Settings,
    working_dir: Path,
    *,
    redo: bool = False,
    refit: str | None = None,
) -> str:
    """The command line that the cluster runs, inside a copy of `working_dir`."""
    path = Path(config).resolve()
    if not path.is_relative_to(working_dir):
        raise UserError(
            f"{config} is not inside {working_dir}, which is what the job takes along (cluster.working_dir)"
        )
    words = [settings.cluster.python, "-m", "pipelines.cli", "run" if refit is None else "refit"]
    words += [str(path.relative_to(working_dir)), *overrides]
    if "://" not in settings.run.directory:
        words.append(f"run.directory={_absolute(settings.run.directory)}")
    if refit is not None:
        words += ["--from", _absolute(refit)]
    return shlex.join([*words, "--redo"] if redo else words)


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().resolve())
