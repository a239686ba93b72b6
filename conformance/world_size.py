"""Markers by the number of ranks: `pytest -m 2gpu`."""

import pytest

#: World sizes that have a marker, registered by `plugin.py`.
WORLD_SIZES = (1, 2, 4, 8)


def world_size_mark(world_size: int) -> pytest.MarkDecorator:
    """Return the marker of a world size; `2gpu` is no Python identifier, so that it can't be `pytest.mark.2gpu`."""
    mark: pytest.MarkDecorator = getattr(pytest.mark, f"{world_size}gpu")
    return mark
