"""Which of a worker's errors come again however often the work is started again."""

from __future__ import annotations

import errno

LASTING_ERRORS: tuple[type[BaseException], ...] = (
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
# A disk that is full, or that nobody may write to, stays so for the next worker.
LASTING_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def is_lasting(error: BaseException, others: tuple[type[BaseException], ...] = ()) -> bool:
    """Whether trying again is vain: one of `LASTING_ERRORS` or of `others`, or a disk that cannot be written.

    A lost peer shows as a RuntimeError, and a network that fails as an OSError: both pass.
    """
    if isinstance(error, LASTING_ERRORS + others):
        return True
    return isinstance(error, OSError) and error.errno in LASTING_NUMBERS
