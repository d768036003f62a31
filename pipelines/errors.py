"""Faults that the person at the keyboard can mend, and how they are told from faults of ours."""

from __future__ import annotations

import dis
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from cluster.lasting import LASTING_NUMBERS

OWN_PACKAGES = ("dspark", "storage", "cluster", "pipelines")
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


class UserError(ValueError):
    """A user's mistake: the message says what was found, what was expected, and which option or command cures it.

    The command line prints the message alone and exits with code 2.
    """


def is_users_mistake(error: BaseException) -> bool:
    """Whether the message alone is for the user: a UserError, or a value or file error that our own code *raises*.

    A ValueError that comes out of a library, or out of a builtin that we called wrongly, keeps its traceback.
    """
    if isinstance(error, UserError):
        return True
    return isinstance(error, (ValueError, OSError)) and _raised_by_us(error.__traceback__)


def _raised_by_us(traceback: TracebackType | None) -> bool:
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code: Any = traceback.tb_frame.f_code.co_code
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    explicit = code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return explicit and module.partition(".")[0] in OWN_PACKAGES


def cannot_write(error: BaseException, directory: str) -> str | None:
    """The message for an error that means a full or read-only disk, or a run's folder that may not be written.

    None for any other error. Libraries in other languages have no errno to show, but the system's own words.
    """
    filename = getattr(error, "filename", None)
    place = os.fsdecode(filename) if isinstance(filename, str | bytes) else ""
    numbers = LASTING_NUMBERS + (NOT_ALLOWED if place and _is_below(place, directory) else ())
    for number in numbers:
        reason = os.strerror(number)
        if (isinstance(error, OSError) and error.errno == number) or (
            number in LASTING_NUMBERS and reason in str(error)
        ):
            at = f" (at {place})" if place else ""
            return (
                f"run.directory: {directory} cannot be written: {reason}{at}; mend that, and the same command goes on "
                "from here, or set another run.directory"
            )
    return None


def _is_below(place: str, directory: str) -> bool:
    if "://" in directory:
        return False
    top = os.path.abspath(os.path.expanduser(directory))
    return os.path.commonpath([os.path.abspath(place), top]) == top


@contextmanager
def for_the_user(directory: str) -> Iterator[None]:
    """Turn what is for the user into a UserError, which keeps its meaning on its way out of a worker.

    Args:
        directory: the run's, which is named where it cannot be written.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (message := cannot_write(error, directory)) is not None:
            raise UserError(message) from error
        if is_users_mistake(error):
            raise UserError(str(error)) from error
        raise
