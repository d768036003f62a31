"""Ray's private parts that are used, against the version that is pinned; nothing else uses any."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import ray

ROOT = Path(__file__).parents[2]
PRIVATE = ("ray._", "ray.experimental", "ray.train.v2._internal")


def test_the_private_parts_are_those_of_the_pinned_version():
    """Another version of Ray: run this file's sessions and groups first, then move the pin."""
    assert f"ray=={ray.__version__}" in (ROOT / "requirements.lock").read_text().split()


def test_what_is_replaced_is_there_and_is_called_as_expected():
    from ray._private import node, parameter, ray_constants, utils, worker
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    assert "no_monitor" in inspect.signature(parameter.RayParams).parameters
    assert "self.start_api_server(" in inspect.getsource(node.Node.start_head_processes)
    assert "if not self._ray_params.no_monitor" in inspect.getsource(node.Node.start_head_processes)
    assert "if self._ray_params.include_log_monitor" in inspect.getsource(node.Node.start_ray_processes)
    assert list(inspect.signature(worker.listen_error_messages).parameters) == ["worker", "threads_stopped"]
    assert "target=listen_error_messages" in inspect.getsource(worker.connect)
    assert not inspect.signature(utils.get_dashboard_dependency_error).parameters
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    for name in ("_create_default_callbacks", "_register_sigint_handler"):
        assert callable(getattr(DataParallelTrainer, name))


def test_one_file_knows_them():
    for package in ("cluster", "pipelines", "storage", "dspark"):
        for path in (ROOT / package).rglob("*.py"):
            imported = set()
            for part in ast.walk(ast.parse(path.read_text())):
                if isinstance(part, ast.ImportFrom) and part.module:
                    imported |= {f"{part.module}.{alias.name}" for alias in part.names}
                elif isinstance(part, ast.Import):
                    imported |= {alias.name for alias in part.names}
            private = [name for name in imported if name.startswith(PRIVATE)]
            assert not private or path.name == "ray_private.py", f"{path}: {private}"
