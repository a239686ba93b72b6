"""Requirement ids are permanent: what the suite checks is what `ids.txt` lists."""

from __future__ import annotations

import inspect

import pytest

from conformance import cache_case, case
from conformance.requirement import Requirement, requirement, requirement_of
from conformance.suite import SUITE

IDS = SUITE / "ids.txt"


def collected() -> list[tuple[Requirement, str]]:
    """Return every requirement of the suite with the function that checks it."""
    classes = {found for module in (case, cache_case) for _, found in inspect.getmembers(module, inspect.isclass)}
    tests = {function for found in classes for function in vars(found).values() if requirement_of(function)}
    return [(named, test.__qualname__) for test in tests if (named := requirement_of(test))]


def listed() -> dict[str, str]:
    """Return the levels by id that `ids.txt` lists."""
    lines = [line.split() for line in IDS.read_text().splitlines() if line and not line.startswith("#")]
    return {line[0]: line[1] for line in lines}


def test_ids_are_listed() -> None:
    assert {named.id: named.level for named, _ in collected()} == listed()


def test_list_is_sorted() -> None:
    assert list(listed()) == sorted(listed())


def test_no_id_has_two_meanings() -> None:
    found: dict[str, set[str]] = {}
    for named, test in collected():
        found.setdefault(named.id, set()).add(test)
    assert {identity: tests for identity, tests in found.items() if len(tests) > 1} == {}


def test_every_test_of_a_case_has_an_id() -> None:
    classes = {found for module in (case, cache_case) for _, found in inspect.getmembers(module, inspect.isclass)}
    tests = {f"{found.__name__}.{name}" for found in classes for name in vars(found) if name.startswith("test_")}
    assert tests == {test for _, test in collected()}


def test_every_requirement_is_two_sentences() -> None:
    for named, _ in collected():
        for sentence in (named.does, named.expects):
            assert sentence[0].isupper(), named
            assert sentence.endswith("."), named


@pytest.mark.parametrize("bad", ["WC-1", "wc-life-001", "WC-LIFE-1", "WC-LIFE-0001", "LIFE-001"])
def test_malformed_id_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="WC-AREA-001"):
        requirement(bad, level="must", does="Something.", expects="Something.")
