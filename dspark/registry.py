"""Parts by name, to which a file of one's own can add: algorithms, sequential heads, loss terms.

A part is a class or a function in one file, with `@algorithms.register("name")` above it. Whoever needs one asks the
registry by the name that stands in the settings. `pipelines/plugins.py` imports the files that `plugins` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dspark.errors import DsparkError

if TYPE_CHECKING:
    from dspark.models.base import Drafter
    from dspark.models.heads import SequentialHead

Part = TypeVar("Part")
Registered = TypeVar("Registered")


class SettingError(DsparkError):
    """A setting has a value that cannot work; the message names value, allowed range and option."""


class Registry(Generic[Part]):
    """Parts of one kind by name, in the order of their registration.

    `modules` register the built-in ones; they are imported at the first look. `option`: the setting that holds a name.
    """

    def __init__(self, kind: str, *, option: str, modules: Sequence[str] = ()) -> None:
        self.kind, self.option = kind, option
        self._modules, self._parts = modules, dict[str, Part]()

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """A decorator. Raises DsparkError for a name that is taken."""

        def put(part: Registered) -> Registered:
            kept: Any = self._parts.setdefault(name, part)  # type: ignore[arg-type]
            if kept is not part:
                raise DsparkError(f"the {self.kind} {name!r} is taken by {kept.__module__}: register another name")
            return part

        return put

    def __getitem__(self, name: str) -> Part:
        """Raises SettingError that names the known ones and the nearest."""
        if name not in self._parts:
            known = list(self)
            if name not in known:
                close = get_close_matches(str(name), known, n=1)
                raise SettingError(
                    f"there is no {self.kind} {name!r}; {f'did you mean {close[0]}? ' if close else ''}"
                    f"known are {', '.join(known)} (option `{self.option}`; a file named under `plugins` adds more)"
                )
        return self._parts[name]

    def known(self, name: str) -> str:
        """The name itself. Raises SettingError where there is no such part."""
        assert self[name]
        return name

    def __iter__(self) -> Iterator[str]:
        for module in self._modules:
            import_module(module)
        return iter(list(self._parts))

    def values(self) -> list[Part]:
        return [self._parts[name] for name in self]


algorithms: Registry[type[Drafter]] = Registry(
    "algorithm",
    option="drafter.algorithm",
    modules=tuple(f"dspark.models.{name}" for name in ("dspark", "dflash", "eagle3", "mtp")),
)
sequential_heads: Registry[type[SequentialHead]] = Registry(
    "sequential head", option="drafter.markov_head_type", modules=("dspark.models.heads",)
)
