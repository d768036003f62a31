"""What this package raises. Every message says what was found and what cures it, and is meant for the user."""

# The cures of a damaged shard, and of a damaged file that every row depends on.
AGAIN = "fetch the shard again, or build it again with `dspark cache CONFIG --repair`"
WHOLE = "every row depends on it: fetch the cache again, or build it anew with `dspark cache CONFIG --repair`"


class StorageError(ValueError):
    """Something that was asked for cannot be done, or something stored cannot be used."""


class StorageFull(StorageError):
    """No room for what is to be written: the disk is full, or a configured limit is reached."""


class NonFiniteState(StorageError):
    """A captured state holds NaN or infinity; its shard is not written."""


class StorageCorrupt(StorageError):
    """Stored bytes are not what was written; the message names the file."""


class CacheCorrupt(StorageCorrupt):
    """The same of a target cache; the message names the row where there is one."""


class CheckpointCorrupt(StorageCorrupt):
    """The same of a checkpoint."""


class UnsafeName(StorageCorrupt):
    """A file names another one that does not lie in its own folder."""


class MissingFile(StorageError, FileNotFoundError):
    """There is no such file, cache or checkpoint."""


class NotAllowed(StorageError, PermissionError):
    """The file system or the store does not let this process do it."""


class StoreFailed(StorageError, OSError):
    """A store went on failing, or kept something else than it was given."""
