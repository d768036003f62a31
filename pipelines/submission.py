"""`dspark submit`: the same run on a Ray cluster, as a Ray job.

The settings are checked here before anything is sent. A relative `run.directory` would end with the job's own working
folder, so it is sent as the absolute path: it has to be on a file system that the cluster sees, or `s3://`, `gs://`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipelines.errors import UserError
from pipelines.settings import load_settings


def submit_run(config: str, overrides: Sequence[str], address: str, *, redo: bool = False) -> str:
    """Submit `dspark run`; returns the job's id. Raises UserError for settings that would not run."""
    from cluster import jobs

    settings = load_settings(config, overrides)
    working_dir = Path(settings.cluster.working_dir).resolve()
    return jobs.submit(
        job_command(config, overrides, settings.run.directory, working_dir, redo=redo),
        address=address,
        working_dir=working_dir,
        env_vars={"DSPARK_HOME": os.environ.get("DSPARK_HOME") or os.getcwd()},
    )


def job_command(config: str, overrides: Sequence[str], directory: str, working_dir: Path, *, redo: bool) -> str:
    """The command line that the cluster runs, inside a copy of `working_dir`."""
    path = Path(config).resolve()
    if not path.is_relative_to(working_dir):
        raise UserError(
            f"{config} is not inside {working_dir}, which is what the job takes along (cluster.working_dir)"
        )
    words = ["python", "-m", "pipelines.cli", "run", str(path.relative_to(working_dir)), *overrides]
    if "://" not in directory:
        words.append(f"run.directory={Path(directory).expanduser().resolve()}")
    return shlex.join([*words, "--redo"] if redo else words)
