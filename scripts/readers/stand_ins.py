"""Empty stand-ins for packages that a reader imports and its mapping of adapters never calls.

Input is their names; afterwards `import NAME.anything` gives classes that do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Nothing:
    def __init__(self, *arguments: object, **options: object) -> None:
        """Take anything."""

    def __call__(self, *arguments: object, **options: object) -> object:
        """Return the first argument, as a decorator would."""
        return arguments[0] if arguments else None

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __class_getitem__(cls, item: object) -> type[_Nothing]:
        return cls


class _Module(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = name.split(".")
        known = any(".".join(parts[:count]) in self.names for count in range(1, len(parts) + 1))
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def stand_in(*names: str) -> None:
    """Let packages that are not installed be imported as empty ones."""
    sys.meta_path.append(_Finder(frozenset(names)))
