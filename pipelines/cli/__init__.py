"""The `dspark` command: commands only, each of them short."""

from pipelines.cli.commands import app, main

__all__ = ["app", "main"]
