"""Take the damaged shards out of a finished cache, so that building it again writes just these."""

from __future__ import annotations

import re
from os import PathLike

from storage.cache.commits import COMPLETE, commit_name, shard_name
from storage.cache.verify import Problem, verify
from storage.errors import CacheCorrupt
from storage.files.filesystems import Folder

_OF_A_UNIT = re.compile(r"(?:shards|commits)/unit-(\d+)\.(?:arrow|json)")


def discard_damaged(root: str | PathLike[str], *, workers: int = 4) -> list[Problem]:
    """Remove every shard in which `verify` finds something wrong; returns what was found.

    The cache is then an unfinished one with the other shards committed. What belongs to no shard and was altered (the
    dataset's description, files left behind) is written anew, or named, when the cache is finished again.

    Raises:
        CacheCorrupt: the manifest, the sample list or a codec is damaged, and nothing else can be trusted without it.
            Nothing is removed.
    """
    folder = Folder(root)
    problems = verify(root, workers=workers)
    shards = set()
    for problem in problems:
        if match := _OF_A_UNIT.fullmatch(problem.file):
            shards.add(int(match[1]))
        elif problem.file.startswith("codecs/") or problem.file in ("manifest.json", "samples.arrow"):
            raise CacheCorrupt(f"{problem}; every row depends on it, so the whole cache is to be built anew")
    if problems and folder.exists(COMPLETE):
        folder.remove(COMPLETE)  # first: from here on readers see an unfinished cache
    for shard in sorted(shards):
        for name in (commit_name(shard), shard_name(shard)):
            if folder.exists(name):
                folder.remove(name)
    return problems
