"""The values the matrix is made of: a layout, and a cell, with the names they go by."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*", re.ASCII)
_ID = re.compile(
    rf"(?P<model>{MODEL_NAME.pattern})/(?P<layout>[a-z0-9-]+)/(?P<mode>[a-z_]+)/(?P<transport>[a-z_]+)", re.ASCII
)
_LAYOUT = re.compile(r"tp(?P<tp>[1-9][0-9]*)", re.ASCII)
#: The transports that go unnamed in a class name; any other is appended.
_UNNAMED_TRANSPORTS = ("private", "shm")


class CellIdError(ValueError):
    """A text that is no cell's id."""


@dataclass(frozen=True, order=True)
class Layout:
    """A parallel layout. `tp`: tensor-parallel size, in ranks.

    A later axis is a field with a default; at that default it appears neither in `short` nor in `arguments()`, so that
    ids and class names written before it stay valid.
    """

    tp: int = 1

    @property
    def world_size(self) -> int:
        """Processes that hold weights."""
        return self.tp

    @property
    def short(self) -> str:
        """The layout's part of a cell id: `tp2`."""
        return f"tp{self.tp}"

    def arguments(self) -> list[str]:
        """Return the launch arguments that a daemon and an engine are given, in SGLang's names."""
        return ["--tp-size", str(self.tp)]


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the matrix.

    `model` is a name in `space.toml`; `mode` is a `--weight-cache-mode` (`off`, `client`, `daemon`); `transport` is how
    the slab is shared (`shm`, ...; `private` where it isn't).
    """

    model: str
    layout: Layout
    mode: str
    transport: str

    @property
    def id(self) -> str:
        """The permanent, readable id: `qwen3-moe-tiny/tp2/client/shm`."""
        return f"{self.model}/{self.layout.short}/{self.mode}/{self.transport}"

    @property
    def class_name(self) -> str:
        """The name of the generated pytest class: `TestQwen3MoeTiny_TP2_Client`."""
        parts = [_camel(self.model), self.layout.short.upper().replace("-", "_"), _camel(self.mode)]
        if self.transport not in _UNNAMED_TRANSPORTS:
            parts.append(_camel(self.transport))
        return "Test" + "_".join(parts)


def parse_cell_id(text: str) -> Cell:
    """Return the cell with this id. Raises `CellIdError`; whether its model exists and it is legal is not looked at."""
    found = _ID.fullmatch(text)
    layout = _LAYOUT.fullmatch(found["layout"]) if found else None
    if not found or not layout:
        raise CellIdError(
            f"{text!r}: not a cell id; expected MODEL/LAYOUT/MODE/TRANSPORT, as in qwen3-tiny/tp2/client/shm"
        )
    return Cell(found["model"], Layout(tp=int(layout["tp"])), found["mode"], found["transport"])


def _camel(text: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[^a-zA-Z0-9]", text))
