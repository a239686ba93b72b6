"""Which checks a cell has is decided when its class is made."""

from __future__ import annotations

import pytest

from conformance.cache_case import CacheCase
from conformance.case import DiskCase, EndsCleanly, GreedyCase
from conformance.classes import make_class, make_classes
from conformance.requirement import requirements_of
from matrix.cell import Cell, Layout
from matrix.generate import cells
from matrix.space import load_space

SPACE = load_space()


def requirements(cell: Cell) -> set[str]:
    return set(requirements_of(make_class(cell, SPACE, __name__)))


def test_every_cell_of_every_tier_has_one_class() -> None:
    every = cells(SPACE)
    classes = make_classes(every, SPACE, __name__)
    assert [case.cell for case in classes.values()] == every
    assert len({id(case.facts) for case in classes.values()}) == len(every)


def test_two_cells_of_one_name_are_refused() -> None:
    cell = cells(SPACE)[0]
    with pytest.raises(ValueError, match="one class name"):
        make_classes([cell, cell], SPACE, __name__)


@pytest.mark.parametrize("mode", ["client", "daemon"])
def test_cached_modes_check_the_cache(mode: str) -> None:
    case = make_class(Cell("qwen3-tiny", Layout(2), mode, "shm"), SPACE, __name__)
    assert issubclass(case, CacheCase)
    assert issubclass(case, GreedyCase)
    assert not issubclass(case, DiskCase)
    assert [mark.name for mark in case.pytestmark] == ["2gpu"]


def test_off_checks_no_cache() -> None:
    off, client = Cell("qwen3-tiny", Layout(), "off", "private"), Cell("qwen3-tiny", Layout(), "client", "shm")
    assert requirements(off) - requirements(client) == {"WC-SOURCE-001", "WC-OUT-003"}
    assert {"WC-SHARE-001", "WC-LEAK-001", "WC-SOURCE-002"} <= requirements(client) - requirements(off)


def test_greedy_tokens_are_checked_in_float32_alone() -> None:
    for model in SPACE.models:
        has = "WC-OUT-002" in requirements(Cell(model.name, Layout(), "client", "shm"))
        assert has == (model.dtype == "float32")


def test_the_end_is_checked_last(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from conformance.classes import make_classes
        from matrix.generate import cells
        from matrix.space import load_space
        space = load_space()
        globals().update(make_classes(cells(space, "smoke"), space, __name__))
        """
    )
    items, _ = pytester.inline_genitems("-p", "no:randomly")
    last = {item.cls.__name__: item.name for item in items}
    assert set(last) == {cell.class_name for cell in cells(SPACE, "smoke")}
    assert set(last.values()) == {"test_nothing_is_left_after_the_end"}
    assert all(issubclass(item.cls, EndsCleanly) for item in items)


pytest_plugins = ["pytester"]
