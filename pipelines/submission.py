"""`dspark submit`: the same run on a Ray cluster, as a Ray job.

1. The settings are checked here, before anything is sent.
2. What the job takes along is counted, and refused beyond `cluster.max_upload_bytes`. Keys and passwords stay here.
3. Inputs with a relative path that are not taken along, and `run.directory`, which would end with the job's own folder,
   are sent as absolute paths: they have to be on a file system that the cluster sees.
4. Of the variables that `cluster.env_vars` names, the values go along, but not those of secrets, as the cluster shows
   what it was sent: the job looks for them on the cluster, and says so at once if they are not there.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from pipelines.settings import Settings, load_settings
from pipelines.settings.yaml import read_document
from storage.files import masking

Upload = Mapping[Path, int]  # bytes of each file that is sent, by its path in the working directory
NO_PATH = ("demonstration:", "benchmark:", "hub:", "package:")


def submit_run(
    config: str,
    overrides: Sequence[str],
    address: str,
    *,
    job: str | None = None,
    redo: bool = False,
    refit: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Submit `dspark run`, or `dspark refit --from` the folder `refit`; returns the job's id.

    Raises UserError for settings that would not run and for what the job would not see, and JobError when no head
    answers.
    """
    from cluster import jobs

    settings = load_settings(config, overrides)
    working_dir = Path(settings.cluster.working_dir).resolve()
    if not working_dir.is_dir():
        raise UserError(f"cluster.working_dir: there is no folder {working_dir}, which the job would take along")
    upload = jobs.files_sent(working_dir)
    say(require_small(upload, working_dir, settings.cluster.max_upload_bytes))
    command = job_command(config, overrides, settings, working_dir, upload, redo=redo, refit=refit, say=say)
    variables, by_name = job_variables(settings.cluster.env_vars)
    if by_name:
        say(f"not sent, and looked for on the cluster: the values of {', '.join(by_name)}")
    home = {"DSPARK_HOME": os.environ.get("DSPARK_HOME") or os.getcwd()}
    return jobs.submit(command, address=address, working_dir=working_dir, env_vars={**home, **variables}, job=job)


def require_small(upload: Upload, working_dir: Path, limit: int) -> str:
    """A line on what is sent. Raises UserError if it is more than `limit` bytes."""
    total = sum(upload.values())
    largest = sorted(upload.items(), key=lambda item: (-item[1], item[0]))[:5]
    named = ", ".join(f"{path} ({_megabytes(size)})" for path, size in largest)
    line = f"{working_dir}: {len(upload):,} files, {_megabytes(total)}; the largest: {named}"
    if total > limit:
        raise UserError(
            f"the job would take along {line}; the limit is {_megabytes(limit)}: name what it does not need in a "
            f".rayignore file there (as in .gitignore), set cluster.working_dir to a smaller folder, or raise "
            "cluster.max_upload_bytes"
        )
    return f"sends {line}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def job_command(
    config: str,
    overrides: Sequence[str],
    settings: Settings,
    working_dir: Path,
    upload: Upload,
    *,
    redo: bool = False,
    refit: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """The command line that the cluster runs, inside a copy of `working_dir`."""
    document = read_document(Path(config))
    for file in dict.fromkeys([config, *(place.rpartition(":")[0] for place in document.places.values())]):
        if file and _sent_as(file, working_dir, upload) is None:
            raise UserError(
                f"{file} is not among the files inside {working_dir} that the job takes along (cluster.working_dir, "
                ".gitignore and .rayignore files there)"
            )
    words = [settings.cluster.python, "-m", "pipelines.cli", "run" if refit is None else "refit"]
    words += [str(_sent_as(config, working_dir, upload)), *overrides]
    words += [f"{key}={json.dumps(value)}" for key, value in _moved(settings, working_dir, upload, say).items()]
    if "://" not in settings.run.directory:
        words.append(f"run.directory={_absolute(settings.run.directory)}")
    if refit is not None:
        words += ["--from", _absolute(refit)]
    return shlex.join([*words, "--redo"] if redo else words)


def _moved(settings: Settings, working_dir: Path, upload: Upload, say: Callable[[str], None]) -> dict[str, Any]:
    """The settings, by key, whose relative paths lead elsewhere in the job, with what they have to be there."""
    moved: dict[str, Any] = {}

    def seen(key: str, path: str | None, *, must_be_there: bool) -> str | None:
        if path is None or "://" in path or path.startswith(NO_PATH) or Path(path).expanduser().is_absolute():
            return path
        if not Path(path).exists():
            if must_be_there:
                raise UserError(f"{key}: there is no {path} here ({Path.cwd()}), and the job would not find it either")
            return path
        if (inside := _sent_as(path, working_dir, upload)) is None:
            say(f"{key}: {path} is not sent; the job reads {_absolute(path)}, which the cluster has to see")
            return _absolute(path)
        return str(inside)

    def note(key: str, before: Any, after: Any) -> None:
        if after != before:
            moved[key] = after

    for split in ("train", "calibration", "evaluation"):
        before = [source.model_dump(mode="json", exclude_none=True) for source in getattr(settings.data, split)]
        paths = [{name: source[name] for name in ("source", "folder") if name in source} for source in before]
        paths = [{name: seen(f"data.{split}", path, must_be_there=True) for name, path in p.items()} for p in paths]
        note(f"data.{split}", before, [{**source, **path} for source, path in zip(before, paths, strict=True)])
    # A name that is no folder here may be one of a hub.
    model, weights = settings.target.model, settings.drafter.initial_weights
    note("target.model", model, seen("target.model", model, must_be_there=False))
    note("drafter.initial_weights", weights, seen("drafter.initial_weights", weights, must_be_there=False))
    table = settings.evaluate.cost.table
    note("evaluate.cost.table", table, seen("evaluate.cost.table", table, must_be_there=True))
    for name, folder in settings.evaluate.baselines.items():
        key = f"evaluate.baselines.{name}"
        note(key, folder, seen(key, folder, must_be_there=True))
    plugins = [
        seen("plugins", plugin, must_be_there=True) if plugin.endswith(".py") else plugin for plugin in settings.plugins
    ]
    note("plugins", list(settings.plugins), plugins)
    return moved


def _sent_as(path: str, working_dir: Path, upload: Upload) -> Path | None:
    """Where the job finds this file, or this folder with all its files, in its copy; None if it does not."""
    here = Path(path).expanduser().resolve()
    if not here.is_relative_to(working_dir):
        return None
    inside = here.relative_to(working_dir)
    if here.is_dir():
        held = {file.relative_to(working_dir) for file in here.rglob("*") if file.is_file()}
        return inside if held and held <= upload.keys() else None
    return inside if inside in upload else None


def job_variables(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(the variables that are set here and may be sent, the names of those that hold a secret)."""
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    by_name = [name for name, value in found.items() if masking.is_secret_name(name) or masking.find(value)]
    return {name: value for name, value in found.items() if name not in by_name}, by_name


def require_variables(names: Sequence[str]) -> None:
    """Raises UserError in a job for secrets that `cluster.env_vars` names and the cluster does not have."""
    missing = [name for name in names if masking.is_secret_name(name) and not os.environ.get(name)]
    if missing:
        raise UserError(
            f"cluster.env_vars names {', '.join(missing)}, whose value is not sent with a job and is not set on the "
            "cluster: set it where the cluster's nodes are started, or take it out of cluster.env_vars"
        )


def _absolute(folder: str) -> str:
    return str(Path(folder).expanduser().resolve())
