"""Writes a run's ledger: a header when its first unit starts, a record when a unit has ended, a footer at the end.

A record is written by the process that ran the class, after the teardown of its last test. Records carry one run id,
so that pytest-xdist's workers write the same ledger as one process alone. The header is written by whoever starts the
first unit, once a run: it is the first that knows the target's version and the cells that were collected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import pytest

from conformance.requirement import requirement_of, requirements_of
from conformance.suite import Suite
from conformance.targets.fault import TargetFault
from matrix.cell import Cell
from matrix.ledger import Footer, Header, Ledger, Outcome, Record, Seconds, now
from matrix.machine import git_revision, load_per_core

#: Verdicts, the worst first. A class is as good as its worst requirement.
WORST_FIRST: tuple[Outcome, ...] = ("error", "failed", "skipped", "passed")
#: Characters kept of a class's reason, and of one requirement's part in it.
REASON_LENGTH, PART_LENGTH = 500, 160
#: Lines of a failure that other fields of the record hold, or that mean nothing on another machine.
_SAID_ELSEWHERE = ("requirement ", "cell ", "alone ", "log ", "command: ", "log: ")


def cell_of(item: pytest.Item | None) -> Cell | None:
    """Return the cell that a test belongs to, or None for any other test."""
    found = getattr(getattr(item, "cls", None), "cell", None)
    return found if isinstance(found, Cell) else None


@dataclass
class _Progress:
    """A class that is being run."""

    case: type
    cell: Cell
    started: float
    load: float | None
    warm: bool | None
    attempt: int
    requirements: dict[str, Outcome] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"setup": 0.0, "call": 0.0, "teardown": 0.0})
    reasons: list[tuple[Outcome, str]] = field(default_factory=list)


class Recorder:
    """Follows the tests of one process and writes the records of its classes."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self._ledger = Ledger(suite.ledger)
        self._open: _Progress | None = None
        self._written = suite.run.directory / "records"

    @cached_property
    def _revision(self) -> str:
        return git_revision()

    def start(self, item: pytest.Item) -> None:
        """A test begins; a class begins with its first."""
        cell = cell_of(item)
        if cell is None or (self._open and self._open.case is item.cls):  # type: ignore[attr-defined]
            return
        self.finish()
        self.suite.run.once("header", lambda: self._write_header(item.session.items))
        case: type = item.cls  # type: ignore[attr-defined]
        self._open = _Progress(case, cell, time.monotonic(), load_per_core(), _is_warm(case), _attempt_of_run())

    def note(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """One phase of a test is over."""
        if self._open is None or cell_of(item) is None:
            return
        self._open.seconds[report.when] += report.duration
        # pytest-rerunfailures counts the tries of a test here.
        self._open.attempt = max(self._open.attempt, getattr(item, "execution_count", 1))
        outcome = _outcome(call, report)
        named = requirement_of(getattr(item, "function", None))
        identity = named.id if named else item.name
        if report.when == "call" or outcome != "passed":
            self._open.requirements[identity] = worst([outcome, self._open.requirements.get(identity, "passed")])
        if outcome != "passed":
            self._open.reasons.append((outcome, f"{identity}: {_told(call, report)}"[:PART_LENGTH]))

    def finish(self) -> None:
        """The class that is open has ended, all its processes too."""
        if self._open is None:
            return
        done, self._open = self._open, None
        missing = sorted(requirements_of(done.case).keys() - done.requirements.keys())
        not_run: list[Outcome] = ["skipped"] if missing else []
        outcome = worst([*done.requirements.values(), *not_run])
        reasons = [text for verdict, text in done.reasons if verdict == outcome]
        if missing and outcome == "skipped":
            # A part of a class was selected. It must not read as the whole: what wasn't run counts as skipped.
            reasons.append(f"not run: {', '.join(missing)}")
        facts = getattr(done.case, "facts", None)
        self._ledger.append(
            Record(
                cell=done.cell.id,
                class_name=done.case.__name__,
                outcome=outcome,
                target=self.suite.target.name,
                target_version=self.suite.version,
                requirements=dict(done.requirements),
                layout_hashes=list(getattr(facts, "layout_hashes", ())),
                digests_digest=list(getattr(facts, "digests_digest", ())),
                seconds=Seconds(
                    launch=round(done.seconds["setup"], 3),
                    tests=round(done.seconds["call"], 3),
                    teardown=round(done.seconds["teardown"], 3),
                    whole=round(time.monotonic() - done.started, 3),
                ),
                machine=self.suite.machine,
                device=self.suite.device,
                world_size=done.cell.layout.world_size,
                transport=done.cell.transport,
                mode=done.cell.mode,
                model=done.cell.model,
                time=now(),
                revision=self._revision,
                run=self.suite.run.id,
                reason="; ".join(reasons)[:REASON_LENGTH],
                load=done.load,
                warm=done.warm,
                attempt=done.attempt,
            )
        )
        self._written.mkdir(exist_ok=True)
        (self._written / done.case.__name__).touch()

    def records(self) -> int:
        """Return how many records all processes of this run have written."""
        return len(list(self._written.iterdir())) if self._written.is_dir() else 0

    def end(self, exit_status: int) -> None:
        """Write the footer, if there was a header."""
        if self.records() or (self.suite.run.directory / "shared" / "header").exists():
            self._ledger.append(
                Footer(run=self.suite.run.id, time=now(), records=self.records(), exit_status=int(exit_status))
            )

    def _write_header(self, items: Iterable[pytest.Item]) -> bytes:
        cells = dict.fromkeys(cell.id for item in items if (cell := cell_of(item)))
        self._ledger.append(
            Header(
                run=self.suite.run.id,
                time=now(),
                revision=self._revision,
                machine=self.suite.machine,
                device=self.suite.device,
                target=self.suite.target.name,
                target_version=self.suite.version,
                cells=list(cells),
                arguments=list(self.suite.run.arguments),
            )
        )
        return b""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of some verdicts."""
    return min(outcomes, key=WORST_FIRST.index)


def _is_warm(case: type) -> bool | None:
    """Return whether a class's checkpoint, with what `transformers` computes of it, is in the cache; None without a model."""
    model = getattr(case, "model", None)
    if model is None:
        return None
    from conformance.checkpoints import Recipe, default_directory  # not needed by a pytest that runs no cell

    return (default_directory() / Recipe.of(model).key).is_dir()


def _attempt_of_run() -> int:
    """Return which try of its job this run is, as the CI service says; 1 where none does."""
    for name, first in (("GITHUB_RUN_ATTEMPT", 1), ("BUILDKITE_RETRY_COUNT", 0)):
        text = os.environ.get(name, "")
        if text.isdecimal():
            return max(1, int(text) - first + 1)
    return 1


def _outcome(call: pytest.CallInfo[None], report: pytest.TestReport) -> Outcome:
    if report.passed:
        return "passed"
    if report.skipped:
        return "skipped"
    # A check that says no, or a target that broke its contract, has failed. Whatever else was raised is our own fault.
    known = (AssertionError, pytest.fail.Exception, TargetFault)
    return "failed" if call.excinfo is None or call.excinfo.errisinstance(known) else "error"


def _told(call: pytest.CallInfo[None], report: pytest.TestReport) -> str:
    text = str(call.excinfo.value) if call.excinfo else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_SAID_ELSEWHERE)]
    return " | ".join(" ".join(line.split()) for line in lines)
