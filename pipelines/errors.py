"""Faults that the person at the keyboard can mend, and what tells them from faults of ours."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import FULL_OR_READ_ONLY, ClusterError
from dspark.errors import DsparkError
from storage.errors import StorageError

NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


class UserError(ValueError):
    """A user's mistake: the message says what was found, what was expected, and which option or command cures it.

    The command line prints the message alone and exits with code 2.
    """


# What each package raises for the user; any other error is a fault of ours, and keeps its traceback.
USER_ERRORS = (UserError, ClusterError, DsparkError, StorageError)


def cannot_write(error: BaseException, directory: str) -> str | None:
    """The message for an error that means a full or read-only disk, or a run's folder that may not be written.

    None for any other error. Libraries in other languages have no errno to show, but the system's own words.
    """
    filename = getattr(error, "filename", None)
    place = os.fsdecode(filename) if isinstance(filename, str | bytes) else ""
    numbers = FULL_OR_READ_ONLY + (NOT_ALLOWED if place and _is_below(place, directory) else ())
    for number in numbers:
        reason = os.strerror(number)
        if (isinstance(error, OSError) and error.errno == number) or (
            number in FULL_OR_READ_ONLY and reason in str(error)
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
        if isinstance(error, USER_ERRORS):
            raise UserError(str(error)) from error
        from safetensors import SafetensorError

        if isinstance(error, SafetensorError):
            raise UserError(
                f"a file of weights cannot be read ({error}): it is damaged or cut off; fetch it again"
            ) from error
        raise
