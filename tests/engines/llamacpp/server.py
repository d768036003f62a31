"""One llama-server on a free loopback port, asked for greedy completions, with its rounds read from its log.

A *round* is one draft block and its verification, as in our own event log. llama.cpp reports totals in its answers
and per-round figures only in its debug log, so the log is kept in full and read after each request.
"""

import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .toolchain import EngineError, LlamaCpp

# float32 caches for target and drafter, and no flash attention: the drafter's cache defaults to f16 by itself.
F32_OPTIONS = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32")
DEBUG_LEVEL = "5"

_CANDIDATE = re.compile(r"- seq_id (\d+), draft candidate +(\d+), pos +(\d+): +(-?\d+) \(")
_ACCEPTED = re.compile(r"add accepted tokens: sampled=(-?\d+), ids\.size=(\d+), n_draft=(\d+)")
_RELEASED = re.compile(r"\brelease: id +\d+ \| task -?\d+ \| stop processing")


@dataclass(frozen=True, kw_only=True)
class EngineRound:
    """One draft block: the tokens proposed, how many of them were verified, how many of those were accepted."""

    draft_ids: tuple[int, ...]
    verified: int
    accepted: int


@dataclass(frozen=True, kw_only=True)
class EngineCompletion:
    """A greedy answer. `rounds` is empty for plain decoding; `draft_n` and `accepted_n` are the server's own totals."""

    output_ids: tuple[int, ...]
    text: str
    stop: str
    draft_n: int
    accepted_n: int
    seconds: float
    rounds: tuple[EngineRound, ...] = ()


@dataclass(kw_only=True)
class Server:
    """A running llama-server; use `serve`."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    read_from: int = field(default=0)

    def complete(self, prompt_ids: Sequence[int], max_new_tokens: int) -> EngineCompletion:
        """Greedy continuation of token ids, at most `max_new_tokens` long."""
        self.read_from = self.log.stat().st_size
        body = {
            "prompt": list(prompt_ids),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        answer = self._post("/completion", body)
        timings = answer["timings"]
        return EngineCompletion(
            output_ids=tuple(answer["tokens"]),
            text=answer["content"],
            stop=answer["stop_type"],
            draft_n=timings.get("draft_n", 0),
            accepted_n=timings.get("draft_n_accepted", 0),
            seconds=(timings["prompt_ms"] + timings["predicted_ms"]) / 1e3,
            rounds=tuple(read_rounds(self._request_log())),
        )

    def _request_log(self, patience: float = 30.0) -> list[str]:
        """The log of the request just answered: the server writes it from another thread, so wait for its last line."""
        deadline = time.monotonic() + patience
        while True:
            with self.log.open("rb") as file:
                file.seek(self.read_from)
                lines = file.read().decode(errors="replace").splitlines()
            if any(_RELEASED.search(line) for line in lines):
                return lines
            if time.monotonic() > deadline:
                raise EngineError(f"llama-server answered but never logged the end of the request; see {self.log}")
            time.sleep(0.05)

    def _post(self, path: str, body: dict[str, object]) -> dict:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=1800) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise EngineError(f"llama-server refused {path}: {error.read().decode()}; see {self.log}") from error
        except urllib.error.URLError as error:
            raise EngineError(f"llama-server is gone ({error.reason}); see {self.log}") from error


def read_rounds(lines: Sequence[str]) -> Iterator[EngineRound]:
    """Rounds of one request out of debug log lines, in order.

    A draft block is logged candidate by candidate, the first candidate of a position being the one proposed; then
    comes the verification. A block that the token limit cut to nothing is never verified, and is left out.
    """
    draft: list[int] = []
    for line in lines:
        if match := _CANDIDATE.search(line):
            _, rank, slot, token = (int(group) for group in match.groups())
            if rank == 0:
                draft = [*draft[:slot], token]
        elif match := _ACCEPTED.search(line):
            _, committed, verified = (int(group) for group in match.groups())
            yield EngineRound(draft_ids=tuple(draft), verified=verified, accepted=committed - 1)
            draft = []


@contextmanager
def serve(
    tools: LlamaCpp,
    target: Path,
    drafter: Path | None = None,
    *,
    block_size: int | None = None,
    context: int = 2048,
    threads: int = 2,
    log: Path,
) -> Iterator[Server]:
    """A server for one target (GGUF), drafting with `drafter` when given; ended, and only it, on leaving."""
    port = _free_port()
    command = [str(tools.server), "-m", str(target), *F32_OPTIONS, "--offline", "--host", "127.0.0.1"]
    command += ["--port", str(port), "-c", str(context), "-np", "1", "-t", str(threads), "-lv", DEBUG_LEVEL]
    command += ["--no-warmup"]
    if drafter is not None:
        command += ["-md", str(drafter), "--spec-type", "draft-dspark", "--spec-draft-n-max", str(block_size)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # setpriv: should this process be killed, the kernel ends the server too.
        process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield Server(url=url, log=log, process=process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, patience: float = 300.0) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise EngineError(f"llama-server ended with code {process.returncode} while loading; log: {log}\n{tail}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise EngineError(f"llama-server was not ready after {patience:.0f} s; log: {log}")
