"""Makes one test class of a cell: picks the checks that apply to it, and its markers."""

from __future__ import annotations

from collections.abc import Iterable

from conformance.cache_case import CacheCase
from conformance.case import DiskCase, EndsCleanly, Facts, GreedyCase, WeightCacheCase
from conformance.world_size import world_size_mark
from matrix.cell import Cell
from matrix.space import Space


def make_class(cell: Cell, space: Space, module: str) -> type[WeightCacheCase]:
    """Return the test class of a cell. Its last base comes first: pytest runs an older base's tests before a younger's."""
    model = space.model(cell.model)
    bases: list[type[WeightCacheCase]] = [EndsCleanly, DiskCase if cell.mode == "off" else CacheCase]
    if model.dtype == "float32":
        bases.append(GreedyCase)
    attributes = {
        "__module__": module,
        "__doc__": f"Cell {cell.id}.",
        "cell": cell,
        "model": model,
        "layout": cell.layout,
        "facts": Facts(),
        "pytestmark": [world_size_mark(cell.layout.world_size)],
    }
    return type(cell.class_name, tuple(bases), attributes)


def make_classes(cells: Iterable[Cell], space: Space, module: str) -> dict[str, type[WeightCacheCase]]:
    """Return the classes of cells by name. Raises ValueError where two cells would have one name."""
    classes: dict[str, type[WeightCacheCase]] = {}
    for cell in cells:
        if cell.class_name in classes:
            raise ValueError(f"{cell.id} and {classes[cell.class_name].cell.id} have one class name, {cell.class_name}")
        classes[cell.class_name] = make_class(cell, space, module)
    return classes
