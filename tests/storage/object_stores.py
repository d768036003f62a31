"""Object stores on loopback, each in a process of its own, and before them a proxy that answers some requests badly.

The proxy draws each answer's fate from a seed: passed on, an error 500 or 503, a connection cut before or in the middle
of the answer, or a delay.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cache_builders import SAMPLES, build, make_plan

from storage.cache.target_cache import TargetCache
from storage.files.filesystems import Folder

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
FAULTS = ("500", "503", "cut before", "cut inside", "late")
SERVE_S3 = """
import sys
from moto.server import ThreadedMotoServer
import logging; logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
# The proxy stands beside the emulator: pyarrow's client of this store holds the interpreter while it waits.
SERVE_GCS = """
import sys
sys.path.insert(0, {folder!r})
from gcp_storage_emulator.server import create_server
from object_stores import FaultyProxy
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
proxy = FaultyProxy(server._api._httpd.server_address[1], rate={rate}, seed={seed}, faults={faults!r})
print(proxy.port, flush=True)
sys.stdin.read()
proxy.close()
server.stop()
"""


def s3_server() -> contextlib.AbstractContextManager[int]:
    """The port of an empty S3-compatible store; the process ends with the block."""
    return _served(SERVE_S3)


def gcs_server(
    *, rate: float = 0.0, seed: int = 0, faults: Sequence[str] = FAULTS
) -> contextlib.AbstractContextManager[int]:
    """The same for an emulator of Google Cloud Storage behind a faulty proxy, with an empty bucket `bucket`."""
    return _served(SERVE_GCS.format(folder=str(Path(__file__).parent), rate=rate, seed=seed, faults=tuple(faults)))


@contextlib.contextmanager
def _served(program: str) -> Iterator[int]:
    environment = {**os.environ, **CREDENTIALS}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)


def make_bucket(port: int, name: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(
        "PUT", f"/{name}", headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/x/us-east-1/s3/x"}
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    connection.close()


class FaultyProxy:
    """Passes requests on to a store; a share of `rate` of them, drawn from `seed`, ends badly. `counts` says how."""

    def __init__(self, store_port: int, *, rate: float, seed: int, faults: Sequence[str] = FAULTS) -> None:
        self.rate, self.counts = rate, Counter[str]()
        generator, lock = random.Random(seed), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                with lock:
                    bad = generator.random() < proxy.rate
                    fate = generator.choice(faults) if bad else "passed"
                    share = generator.random()
                    proxy.counts[fate] += 1
                body = self.read_body()
                if fate == "cut before":
                    self.close_connection = True
                    self.connection.close()
                    return
                if fate in ("500", "503"):
                    self.reply(int(fate), {}, b"<Error><Code>InternalError</Code></Error>")
                    return
                if fate == "late":
                    time.sleep(0.2)
                status, headers, data = self.forward(body)
                if fate == "cut inside":
                    self.reply(status, headers, data, cut=int(share * len(data)))
                else:
                    self.reply(status, headers, data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def read_body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                data = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return data

            def forward(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", store_port)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
                headers["Content-Length"] = str(len(body))
                connection.request(self.command, self.path, body, headers)
                response = connection.getresponse()
                data = response.read()
                connection.close()
                return response.status, dict(response.getheaders()), data

            def reply(self, status: int, headers: Mapping[str, str], data: bytes, cut: int | None = None) -> None:
                length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data if cut is None else data[:cut])
                if cut is not None:
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *ignored: None  # type: ignore[method-assign]
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def faults(self) -> int:
        return sum(count for fate, count in self.counts.items() if fate != "passed")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def check_build_and_reading(url: str, folder: Path) -> None:
    """A cache built at `url` has the files of one built locally, and reads right through a small local copy."""
    plan = make_plan("int8")
    build(folder / "local", plan)
    build(url, plan)
    local, remote = Folder(folder / "local"), Folder(url)
    assert remote.files() == local.files()
    assert all(remote.read(name) == local.read(name) for name in local.files())
    cache = TargetCache.open(url, local_copy=folder / "copy", local_copy_bytes=24_000)
    assert [row.sample_id for row in cache.rows([5, 13, 0, 2, 9])] == [SAMPLES[i][0] for i in (5, 13, 0, 2, 9)]
    assert cache.verify() == []


def check_interrupted_writer(folder: Folder) -> None:
    """What a writer began and did not end is no object, and what is not there is named."""

    def broken() -> None:
        with folder.writer("half") as stream:
            stream.write(b"x" * 20_000_000)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken()
    assert folder.files() == {}
    with pytest.raises(FileNotFoundError, match="nothing"):
        folder.read("nothing")
