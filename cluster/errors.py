"""What this package raises for the user, and which errors of work are vain to try again."""

from __future__ import annotations

import errno


class ClusterError(ValueError):
    """Something about the machines that the user can mend: the message says what was found and what cures it."""


class ClusterLost(ClusterError):
    """The Ray cluster went away under the run; the same command goes on from what is complete."""


class NoCluster(ClusterError, ConnectionError):
    """No Ray cluster answers at an address."""


class JobError(ClusterError):
    """The head did not answer, or knows no such job."""


class NonRetryableError(RuntimeError):
    """Work that would fail again however often it is started again."""


FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # a disk stays so for the next worker
_NON_RETRYABLE: tuple[type[BaseException], ...] = (
    NonRetryableError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,  # torch's "not compiled with CUDA" among them
    NotImplementedError,
    ImportError,
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)


def is_retryable(error: BaseException) -> bool:
    """Whether it may help to try again: a lost peer shows as a RuntimeError, a network that fails as an OSError."""
    if isinstance(error, OSError) and error.errno in FULL_OR_READ_ONLY:
        return False
    return not isinstance(error, _NON_RETRYABLE)
