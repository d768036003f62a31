"""Names that come from a file: resolved inside one folder, and refused if they lead out of it.

Whoever reads a name out of a manifest, a record or an index asks here before opening it. `Folder` refuses by itself
whatever would climb out, and `Folder.inside` adds the rest.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from storage.errors import UnsafeName

LONGEST_NAME, LONGEST_PART = 1024, 255  # bytes of a name, and of what stands between two slashes
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\:]|[\ud800-\udfff]|(?:^|/)(?:\.{0,2}(?:/|$))")


def checked_name(name: object, source: str) -> str:
    """`name` if it is a plain relative name: parts joined by `/`, none of them empty, `.` or `..`.

    Control characters, backslashes and colons are refused too: on one system or another they change what is meant.
    `source`: the file that gives the name. UnsafeName says which name it was.
    """
    if not isinstance(name, str):
        raise UnsafeName(f"{source}: {str(name)[:60]!r} stands where the name of a file should be; {_CURE}")
    if (
        _FORBIDDEN.search(name)
        or len(name.encode()) > LONGEST_NAME
        or any(len(part.encode()) > LONGEST_PART for part in name.split("/"))
    ):
        raise UnsafeName(f"{source}: it names {name[:80]!r}, which is no name of a file in its own folder; {_CURE}")
    return name


def path_inside(root: str | PathLike[str], name: object, source: str) -> Path:
    """The path of `name` below the local folder `root`, checked as in `checked_name`, and no link out of it.

    UnsafeName for a name that leads out of the folder, by itself or by a symbolic link. The file need not exist.
    """
    path = Path(root, checked_name(name, source))
    try:
        real, top = path.resolve(), Path(root).resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise UnsafeName(f"{source}: {name!r} cannot be resolved ({error}); {_CURE}") from None
    if not real.is_relative_to(top):
        raise UnsafeName(
            f"{source}: {name!r} is a link to {real}, outside {root}: put the file itself there, or open the folder "
            "that it leads to"
        )
    return path


_CURE = "do not use this folder unless you know who changed it; fetch or build it again"
