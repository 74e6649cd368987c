"""Where each value of the configuration came from, and how an error says so.

A path is a key in pieces, such as `("sampling", "phases", "0", "phase")`; a place is `headrace.toml:17:1`, the name of
an environment variable, or that of a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field

Path = tuple[str, ...]


class Origins(Struct):
    """The places of all values that are not defaults.

    Attributes:
        places: by path, of tables and of the elements of arrays too.
        leaves: the paths at which one place settled the whole value.
    """

    places: dict[Path, str] = field(default_factory=dict)
    leaves: set[Path] = field(default_factory=set)

    def note(self, path: Path, value: object, place: Callable[[Path], str], *, leaf: bool = True) -> None:
        """Remember that *value* at *path*, and all in it, came from *place*."""
        self.places[path] = place(path)
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.note((*path, str(key)), item, place, leaf=leaf)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.note((*path, str(index)), item, place, leaf=False)
        if leaf and not isinstance(value, Mapping):
            self.leaves.add(path)

    def forget(self, path: Path) -> None:
        """The value at *path* is replaced as a whole."""
        self.places = {known: place for known, place in self.places.items() if known[: len(path)] != path}
        self.leaves.intersection_update(self.places)

    def origin(self, path: Path) -> str:
        """Who settled the value at *path*: a place, or `default`."""
        return next((self.places[start] for start in _starts(path) if start in self.leaves), "default")

    def place(self, path: Path) -> str:
        """The place nearest to *path*, for an error; "" where nobody wrote anything."""
        return next((self.places[start] for start in _starts(path) if start in self.places), "")


class Where(Struct, frozen=True):
    """A key to complain about; `where / "part"` goes one deeper. As text: `place: key`, or `key` without a place."""

    path: Path
    origins: Origins = field(default_factory=Origins)

    def __truediv__(self, part: object) -> Where:
        return Where((*self.path, str(part)), self.origins)

    @property
    def key(self) -> str:
        return ".".join(self.path)

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.origins.place(self.path), self.key)))


def no_origin(key: str) -> Where:
    """Where a setting comes from, for those who do not know."""
    return Where(tuple(key.split(".")))


def _starts(path: Path) -> list[Path]:
    return [path[:length] for length in range(len(path), 0, -1)]
