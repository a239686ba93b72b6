"""Readings from JUnit XML, pytest-reportlog and pytest-split: what pytest itself writes, and what is wrong with a file."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.other_suites import Origin, OtherSuiteError, read_durations, read_junit, read_reportlog, unit_of
from ci.sources import SourceError, gather, kind_of
from conformance.selftest.ci_samples import AS_OF, KIND

pytest_plugins = ["pytester"]
ORIGIN = Origin("file", KIND, AS_OF)
TESTS = """
import pytest
class TestA:
    def test_one(self): pass
    @pytest.mark.parametrize("value", ["a::b", "[x]"])
    def test_two(self, value): pass
    @pytest.mark.skip
    def test_three(self): pass
class TestB:
    def test_bad(self): assert False
    class TestInner:
        def test_in(self): pass
class TestC:
    @pytest.fixture
    def broken(self): raise OSError
    def test_broken(self, broken): pass
@pytest.mark.skip
def test_free(): pass
"""
OUTCOMES = {"TestA": "passed", "TestB": "failed", "TestB::TestInner": "passed", "TestC": "error", "": "skipped"}


def phase(
    name: str, when: str, seconds: float, outcome: str = "passed", stop: object = 1_790_000_000.5
) -> dict[str, object]:
    return {
        "$report_type": "TestReport",
        "nodeid": name,
        "when": when,
        "duration": seconds,
        "outcome": outcome,
        "stop": stop,
    }


def lines(*content: dict[str, object]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in content).encode()


@pytest.mark.parametrize("family", ["xunit1", "xunit2"])
def test_junit_of_pytest_itself(pytester: pytest.Pytester, family: str) -> None:
    pytester.mkdir("tests")
    (pytester.path / "tests" / "test_a.py").write_text(TESTS)
    pytester.runpytest_subprocess("tests", "--junitxml=j.xml", "-o", f"junit_family={family}")
    found = read_junit((pytester.path / "j.xml").read_bytes(), ORIGIN)
    assert {one.class_name: one.outcome for one in found} == {
        f"tests/test_a.py{'::' if name else ''}{name}": outcome for name, outcome in OUTCOMES.items()
    }
    assert {(one.machine, one.run, one.time.tzinfo is not None) for one in found} == {(KIND, "file", True)}
    assert all(one.seconds.whole == one.seconds.tests >= 0 for one in found)


def test_junit_adds_up_a_class_and_each_suite_is_a_reading() -> None:
    text = b"""<testsuites>
      <testsuite timestamp="2026-11-01T10:00:00"><testcase classname="a.test_b.TestC" name="x" time="1,200.5"/>
        <testcase classname="a.test_b.TestC" name="y" time="2.0"/></testsuite>
      <testsuite><testcase classname="a.test_b.TestC" name="x" time="7"><failure/></testcase></testsuite></testsuites>"""
    first, second = read_junit(text, ORIGIN)
    assert (first.class_name, first.seconds.whole, first.outcome) == ("a/test_b.py::TestC", 1202.5, "passed")
    assert first.time == datetime(2026, 11, 1, 10, tzinfo=UTC)
    assert (second.time, second.outcome) == (AS_OF, "failed")
    assert first.run != second.run
    assert read_junit(text, Origin("file", KIND, AS_OF, "file"))[0].class_name == "a/test_b.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"<testsuites>", "file: not XML: no element found"),
        (b"<html/>", "file: root is <html>; JUnit files have <testsuites> or <testsuite>"),
        (b"<!DOCTYPE x [<!ENTITY a 'b'>]><testsuite/>", "file: has a document type"),
        (b"<testsuite><testcase name='x' time='soon'/></testsuite>", "file: x: time is 'soon'; seconds expected"),
        (b"<testsuite><testcase name='x'/></testsuite>", "file: x: time is None; seconds expected"),
        (b"<testsuite timestamp='today'/>", "file: timestamp is 'today'; an ISO 8601 time expected"),
    ],
)
def test_junit_that_makes_no_sense_is_one_line(text: bytes, message: str) -> None:
    with pytest.raises(OtherSuiteError, match=f"^{re.escape(message)}[^\n]*$"):
        read_junit(text, ORIGIN)


def test_reportlog_tells_stages_apart() -> None:
    name = "tests/test_a.py::TestA::test_one"
    (found,) = read_reportlog(
        lines(
            {"pytest_version": "9.2.0", "$report_type": "SessionStart"},
            phase(name, "setup", 5.0),
            phase(name, "call", 1.0),
            phase(name, "teardown", 0.25),
            phase("tests/test_a.py::TestA::test_two[a::b]", "call", 2.0, stop=1_790_000_009.5),
        ),
        ORIGIN,
    )
    assert (found.class_name, found.outcome, found.attempt) == ("tests/test_a.py::TestA", "passed", 1)
    assert (found.seconds.launch, found.seconds.tests, found.seconds.teardown, found.seconds.whole) == (
        5.0,
        3.0,
        0.25,
        8.25,
    )
    assert found.time == datetime.fromtimestamp(1_790_000_009.5, UTC)


@pytest.mark.parametrize(
    ("phases", "outcome", "attempt"),
    [
        ([("setup", "passed"), ("call", "skipped"), ("teardown", "passed")], "skipped", 1),
        ([("setup", "skipped"), ("teardown", "passed")], "skipped", 1),
        ([("setup", "failed"), ("teardown", "passed")], "error", 1),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "failed", 1),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "failed")], "error", 1),
        ([("setup", "passed"), ("call", "rerun"), ("setup", "passed"), ("call", "passed")], "passed", 2),
    ],
)
def test_reportlog_outcomes(phases: list[tuple[str, str]], outcome: str, attempt: int) -> None:
    (found,) = read_reportlog(lines(*(phase("a.py::T::t", when, 1.0, one) for when, one in phases)), ORIGIN)
    assert (found.outcome, found.attempt) == (outcome, attempt)


def test_reportlog_of_a_killed_run_loses_its_last_line_alone() -> None:
    whole = lines(phase("a.py::T::t", "call", 1.0), phase("a.py::T::t", "teardown", 1.0))
    (found,) = read_reportlog(whole[:-20], ORIGIN)
    assert found.seconds.whole == 1.0
    with pytest.raises(OtherSuiteError, match=r"^file:1: "):
        read_reportlog(whole[20:], ORIGIN)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (phase("a.py::T::t", "call", 1.0) | {"nodeid": 7}, "file:1: a TestReport without nodeid, when or outcome"),
        (phase("a.py::T::t", "call", 1.0) | {"duration": "long"}, "file: a.py::T::t: time is 'long'"),
        (phase("a.py::T::t", "call", 1.0, stop=1e300), "file: stop is 1e+300; seconds since 1970"),
    ],
)
def test_reportlog_that_makes_no_sense_is_one_line(report: dict[str, object], message: str) -> None:
    with pytest.raises(OtherSuiteError, match=f"^{re.escape(message)}[^\n]*$"):
        read_reportlog(lines(report), ORIGIN)


def test_durations_of_pytest_split() -> None:
    content = {
        "tests/test_a.py::TestA::test_one": 1.5,
        "tests/test_a.py::TestA::test_two[a::b]": 2,
        "tests/test_a.py::test": 4.0,
    }
    found = read_durations(json.dumps(content, indent=4).encode(), ORIGIN)
    assert [(one.class_name, one.seconds.whole, one.time) for one in found] == [
        ("tests/test_a.py::TestA", 3.5, AS_OF),
        ("tests/test_a.py", 4.0, AS_OF),
    ]
    with pytest.raises(OtherSuiteError, match=r"^file: not seconds by node id, as pytest-split stores: "):
        read_durations(b'{"a": "b"}', ORIGIN)


@given(st.lists(st.from_regex(r"[A-Za-z_]{1,8}", fullmatch=True), min_size=1, max_size=4), st.text(max_size=10))
def test_units_ignore_what_is_in_brackets(parts: list[str], parameter: str) -> None:
    nodeid = "::".join(["tests/test_a.py", *parts])
    assert unit_of(f"{nodeid}[{parameter}]", "class") == unit_of(nodeid, "class")
    assert unit_of(nodeid, "class") == "::".join(["tests/test_a.py", *parts[:-1]])
    assert unit_of(f"{nodeid}[{parameter}]", "file") == "tests/test_a.py"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "ledger"),
        (b'{"type":"rec\n{"type":"footer","run":"a"}', "ledger"),
        (b"\xef\xbb\xbf <?xml?><testsuites/>", "JUnit XML"),
        (lines(phase("a.py::T::t", "call", 1.0)), "pytest-reportlog"),
        (b'{\n    "a.py::t": 1.5\n}', "pytest-split"),
        (b"{}", "pytest-split"),
        (b"poem", None),
        (b"[1, 2]", None),
        (b"\x00\xff", None),
    ],
)
def test_what_a_file_is_its_content_says(content: bytes, kind: str | None) -> None:
    assert kind_of(content) == kind


def test_sources_that_can_not_be_used_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("poem")
    (tmp_path / "j.xml").write_text("<testsuite/>")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("nix.jsonl", "nix.jsonl: No such file or directory"),
        ("poem.txt", "poem.txt: no ledger, JUnit XML, pytest-reportlog or pytest-split file"),
        ("j.xml", "j.xml: a JUnit XML file names no machine; say which kind it is of with --machine KIND"),
        ("empty", "empty: holds no *.jsonl, *.xml, .test_durations, at any depth"),
    ):
        with pytest.raises(SourceError, match=f"^{re.escape(f'{tmp_path}/{message}')}$"):
            gather([str(tmp_path / name)], AS_OF, None)
