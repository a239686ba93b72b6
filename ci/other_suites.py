"""Readings of suites that keep no ledger: JUnit XML, pytest-reportlog, and the duration files of pytest-split.

None of them names the machine, and not all the time; the caller gives both. Units are classes (`tests/test_a.py::TestA`,
or the file for tests outside a class) or whole files; a unit has passed if all its tests have.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ci.readings import Reading
from matrix.ledger import Seconds

Unit = Literal["class", "file"]
#: The worst first; the phases of pytest by the stage that they count to.
_WORST_FIRST = ("error", "failed", "skipped", "passed")
_STAGES = {"setup": "launch", "call": "tests", "teardown": "teardown"}


class OtherSuiteError(Exception):
    """A file of another tool that can't be read; the text is one line that names the file."""


@dataclass(frozen=True)
class Origin:
    """What the files don't say. `path`: the file, for messages and as the run's id. `machine`: its kind. `as_of`: the time
    of readings without one. `unit`: what is estimated. `revision`: of the code under test, where it is known."""

    path: str
    machine: str
    as_of: datetime
    unit: Unit = "class"
    revision: str = ""


@dataclass
class _Sum:
    """A unit while its tests are added up."""

    stages: dict[str, float] = field(default_factory=lambda: {"launch": 0.0, "tests": 0.0, "teardown": 0.0})
    outcomes: list[str] = field(default_factory=list)
    time: datetime | None = None
    retried: bool = False


def read_junit(data: bytes, origin: Origin) -> tuple[Reading, ...]:
    """Return the readings of a JUnit XML file: one a unit and test suite. Raises `OtherSuiteError`.

    A `testcase` names its class with dots (`tests.test_a.TestA`), and its file too in pytest's `xunit1` family. Times are
    of all phases together, so that they count as tests; a suite without `timestamp` is of the origin's time.
    """
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise OtherSuiteError(
            f"{origin.path}: has a document type; JUnit files need none, and it may expand without end"
        )
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise OtherSuiteError(f"{origin.path}: not XML: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise OtherSuiteError(f"{origin.path}: root is <{root.tag}>; JUnit files have <testsuites> or <testsuite>")
    found: list[Reading] = []
    for number, suite in enumerate(root.iter("testsuite")):
        sums: dict[str, _Sum] = {}
        began = _iso_time(suite.get("timestamp"), origin)
        for case in suite.iterfind("testcase"):
            one = sums.setdefault(_junit_unit(case, origin.unit), _Sum(time=began))
            one.stages["tests"] += _seconds(case.get("time"), origin, case.get("name") or "a testcase")
            one.outcomes.append(_junit_outcome(case))
        found += _readings(sums, origin, f"#{number}" if number else "")
    return tuple(found)


def read_reportlog(data: bytes, origin: Origin) -> tuple[Reading, ...]:
    """Return the readings of a `pytest-reportlog` file, one a unit: setup counts as launch, call as tests.

    The time is the latest `stop` of the unit. A torn last line is left out, as of a run that was killed. Raises
    `OtherSuiteError`.
    """
    sums: dict[str, _Sum] = {}
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == len(lines):  # every whole line ends in a newline
                continue
            raise OtherSuiteError(f"{origin.path}:{number}: {error}") from error
        if line.get("$report_type") != "TestReport":
            continue
        name, when, outcome = line.get("nodeid"), line.get("when"), line.get("outcome")
        if not isinstance(name, str) or when not in _STAGES or not isinstance(outcome, str):
            raise OtherSuiteError(f"{origin.path}:{number}: a TestReport without nodeid, when or outcome")
        one = sums.setdefault(unit_of(name, origin.unit), _Sum())
        one.stages[_STAGES[when]] += _seconds(line.get("duration"), origin, name)
        one.retried |= outcome == "rerun"
        # Setup and teardown pass for a skipped test too; they tell only by going wrong.
        if outcome != "rerun" and (when == "call" or outcome != "passed"):
            one.outcomes.append("error" if outcome == "failed" and when != "call" else outcome)
        stop = line.get("stop")
        if isinstance(stop, int | float) and not isinstance(stop, bool):
            ended = _epoch_time(stop, origin)
            one.time = max(one.time or ended, ended)
    return tuple(_readings(sums, origin, ""))


def read_durations(data: bytes, origin: Origin) -> tuple[Reading, ...]:
    """Return the readings of a `pytest-split` duration file (`.test_durations`): seconds by node id, one reading a unit.

    It keeps one value a test, of passing or failing runs alike, and no time; the origin's is taken. Raises
    `OtherSuiteError`.
    """
    try:
        content = msgspec.json.decode(data, type=dict[str, float])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OtherSuiteError(f"{origin.path}: not seconds by node id, as pytest-split stores: {error}") from error
    sums: dict[str, _Sum] = {}
    for name, seconds in content.items():
        one = sums.setdefault(unit_of(name, origin.unit), _Sum())
        one.stages["tests"] += seconds
        one.outcomes.append("passed")
    return tuple(_readings(sums, origin, ""))


def unit_of(nodeid: str, unit: Unit) -> str:
    """Return the unit that a pytest node id belongs to: its file, or `FILE::CLASS` where it has a class."""
    parts = nodeid.split("[", 1)[0].split("::")
    return "::".join(parts[:-1]) if unit == "class" and len(parts) > 2 else parts[0]


def _junit_unit(case: ElementTree.Element, unit: Unit) -> str:
    """Return `FILE::CLASS` or `FILE`; from dots alone, the last part that begins with a capital is taken for the class."""
    dotted = (case.get("classname") or "").split(".")
    classes = [at for at, part in enumerate(dotted) if part[:1].isupper()]
    cut = classes[0] if classes else len(dotted)
    file = case.get("file") or "/".join(dotted[:cut]) + ".py"
    return "::".join([file, *dotted[cut:]]) if unit == "class" else file


def _junit_outcome(case: ElementTree.Element) -> str:
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return outcome
    return "passed"


def _readings(sums: dict[str, _Sum], origin: Origin, suffix: str) -> Iterator[Reading]:
    for name, one in sums.items():
        yield Reading(
            class_name=name,
            machine=origin.machine,
            outcome=_worst(one.outcomes),
            seconds=Seconds(**one.stages, whole=sum(one.stages.values())),
            time=one.time or origin.as_of,
            revision=origin.revision,
            run=origin.path + suffix,
            attempt=2 if one.retried else 1,
        )


def _worst(outcomes: Iterable[str]) -> str:
    """Return the worst outcome; tests that were skipped among others that passed don't make a class skipped."""
    seen = set(outcomes)
    if seen - {"skipped"} == {"passed"}:
        return "passed"
    return next((one for one in _WORST_FIRST if one in seen), "error")


def _seconds(value: object, origin: Origin, name: str) -> float:
    try:
        return float(str(value).replace(",", ""))  # some writers group thousands: 1,234.5
    except ValueError as error:
        raise OtherSuiteError(f"{origin.path}: {name}: time is {value!r}; seconds expected") from error


def _iso_time(text: str | None, origin: Origin) -> datetime:
    """Return a suite's time. One without a zone is taken as UTC: what wrote it didn't say."""
    if not text:
        return origin.as_of
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise OtherSuiteError(f"{origin.path}: timestamp is {text!r}; an ISO 8601 time expected") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _epoch_time(seconds: float, origin: Origin) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise OtherSuiteError(f"{origin.path}: stop is {seconds!r}; seconds since 1970 expected") from error
