"""What this package raises. Every message says what was found and what cures it, and is meant for the user."""


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
