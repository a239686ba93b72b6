"""Expand the space to its legal cells."""

from __future__ import annotations

from itertools import product
from typing import TypeVar

from matrix.cell import Cell, Layout
from matrix.rules import decide
from matrix.space import Space

T = TypeVar("T")


def combinations(space: Space, tier: str | None = None) -> list[Cell]:
    """Return every combination of a tier (None: of the space), legal or not, in the space's order.

    Raises KeyError for an unknown tier.
    """
    chosen = space.tier(tier) if tier is not None else None
    axes = space.axes
    models = tuple(model.name for model in space.models)
    if chosen is not None:
        models = tuple(name for name in models if chosen.models is None or name in chosen.models)
    return [
        Cell(model, Layout(tp=tp), mode, transport)
        for model, tp, mode, transport in product(
            models,
            _chosen(axes.tp, chosen.tp if chosen else None),
            _chosen(axes.mode, chosen.mode if chosen else None),
            _chosen(axes.transport, chosen.transport if chosen else None),
        )
    ]


def cells(space: Space, tier: str | None = None) -> list[Cell]:
    """Return the legal cells of a tier (None: of all tiers), each once, in the space's order.

    The order is by model, layout, mode, transport as the space lists them, and doesn't depend on the tier. Raises
    KeyError for an unknown tier.
    """
    if tier is None:
        wanted = {cell for name in space.tiers for cell in cells(space, name)}
        return [cell for cell in combinations(space) if cell in wanted]
    shapes = {model.name: model.shape for model in space.models}
    return [cell for cell in combinations(space, tier) if not decide(shapes[cell.model], cell)]


def _chosen(values: tuple[T, ...], subset: tuple[T, ...] | None) -> tuple[T, ...]:
    return values if subset is None else tuple(value for value in values if value in subset)
