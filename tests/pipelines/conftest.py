"""A toy target as a model folder."""

from pathlib import Path

import pytest
from toy_target import write_gguf

from pipelines.data.gguf_file import convert_llama


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_gguf(folder / "toy.gguf", tied=True)
    convert_llama(folder / "toy.gguf", folder)
    (folder / "toy.gguf").unlink()
    return folder
