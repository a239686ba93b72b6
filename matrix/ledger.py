"""The ledger: one JSON line a result, appended under a lock, read so that nothing lost or cut goes unseen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
from filelock import FileLock

LEDGER_FORMAT = 1
Outcome = Literal["passed", "failed", "skipped", "error"]


class LedgerError(Exception):
    """A ledger that can't be read at all; the text is one line that names the file."""


class Seconds(msgspec.Struct, frozen=True):
    """Where a class's time went, in seconds: starting processes, its tests, stopping them, and all of it."""

    launch: float
    tests: float
    teardown: float
    whole: float


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="header"):
    """The first line of a run. `cells` are the ids that it set out to measure, `arguments` its command line."""

    run: str
    time: datetime
    revision: str
    machine: str
    device: str
    target: str
    target_version: str
    cells: list[str] = []
    arguments: list[str] = []
    format: int = LEDGER_FORMAT


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="record"):
    """The result of one cell's class.

    `requirements`: outcome by requirement id. `layout_hashes`, `digests_digest`: one a rank, in rank order; empty where
    they weren't obtained. `device`: `cpu`, or what the ranks ran on. `machine`: the machine kind. `time`: the end, in
    UTC. `revision`: of this repository. `run`: the id in the run's header. `reason`: the text of a failure or skip, short.
    What may have made it slow, each None in a ledger that doesn't say: `load`, the machine's 1-minute load average
    divided by its cores when the class began; `warm`, whether its checkpoint and expected results were in the cache by
    then; `attempt`, 1 for a first try, more where the run or one of its tests was retried.
    """

    cell: str
    class_name: str
    outcome: Outcome
    target: str
    target_version: str
    requirements: dict[str, str]
    layout_hashes: list[str]
    digests_digest: list[str]
    seconds: Seconds
    machine: str
    device: str
    world_size: int
    transport: str
    mode: str
    model: str
    time: datetime
    revision: str
    run: str
    reason: str = ""
    load: float | None = None
    warm: bool | None = None
    attempt: int | None = None
    format: int = LEDGER_FORMAT


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="footer"):
    """The last line of a run that came to its end. `records` is how many the run wrote; `exit_status` is pytest's."""

    run: str
    time: datetime
    records: int
    exit_status: int
    format: int = LEDGER_FORMAT


Line = Header | Record | Footer


class Run(msgspec.Struct, frozen=True):
    """The lines of one run. Without a footer it was cut short, or is still going on."""

    id: str
    header: Header | None
    records: tuple[Record, ...]
    footer: Footer | None


class Problem(msgspec.Struct, frozen=True):
    """Something that a reader of a ledger must be told. `line` is counted from 1; 0 where it is about no single line."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


class LedgerContents(msgspec.Struct, frozen=True):
    """All that was read, and what was wrong with it."""

    runs: tuple[Run, ...]
    problems: tuple[Problem, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Every run's records, in the order in which they were read."""
        return tuple(record for run in self.runs for record in run.records)


class Ledger:
    """Appends lines to a file that other processes may be appending to."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = FileLock(f"{self.path}.lock")

    def append(self, line: Line) -> None:
        """Append one line, whole or not at all as far as other processes see. Raises OSError.

        A line that an earlier, killed process left unfinished is ended first, so that it spoils no line but its own.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.encode(line) + b"\n"
        with self._lock, self.path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    data = b"\n" + data
            file.write(data)


def now() -> datetime:
    """Return the time in UTC, to the millisecond, for a line's `time`."""
    moment = datetime.now(UTC)
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


class _Envelope(msgspec.Struct):
    """What every line has, whatever its format."""

    type: str
    format: int


class _Unfinished:
    """A run while its lines are read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.header: Header | None = None
        self.records: list[Record] = []
        self.footer: Footer | None = None


def read(paths: Iterable[str | Path]) -> LedgerContents:
    """Read ledgers. Raises `LedgerError` for a file that can't be opened or has a line of a newer format.

    A line that can't be decoded is lost alone, and is one of the `problems`; so is a run without header or footer, or
    whose footer counts other records than were read.
    """
    return parse((path, _bytes_of(path)) for path in map(str, paths))


def parse(texts: Iterable[tuple[str, bytes]]) -> LedgerContents:
    """Read ledgers that are in memory already: pairs of a name, for messages, and the content. Otherwise as `read`."""
    runs: dict[str, _Unfinished] = {}
    problems: list[Problem] = []
    for path, text in texts:
        for number, raw in enumerate(text.split(b"\n"), 1):
            if not raw.strip():
                continue
            try:
                line = _decode(raw, path, number)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problems.append(Problem(path, number, f"lost line: {error}"))
                continue
            run = runs.setdefault(line.run, _Unfinished(path))
            if isinstance(line, Record):
                run.records.append(line)
            elif isinstance(line, Header):
                run.header = line
            else:
                run.footer = line
    for name, run in runs.items():
        problems += [Problem(run.path, 0, f"run {name}: {text}") for text in _complaints(run)]
    return LedgerContents(
        tuple(Run(name, run.header, tuple(run.records), run.footer) for name, run in runs.items()), tuple(problems)
    )


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}") from error


def _decode(raw: bytes, path: str, number: int) -> Line:
    envelope = msgspec.json.decode(raw, type=_Envelope)
    if envelope.format > LEDGER_FORMAT:
        raise LedgerError(
            f"{path}:{number}: ledger format {envelope.format} is newer than {LEDGER_FORMAT}, the newest that this version reads"
        )
    line: Line = msgspec.json.decode(raw, type=Line)
    if line.time.tzinfo is None:
        raise msgspec.ValidationError("time has no time zone - at `$.time`")
    return line


def _complaints(run: _Unfinished) -> list[str]:
    found = []
    if run.header is None:
        found.append("no header: its first line is lost")
    if run.footer is None:
        found.append("no footer: it was cut short, or is still going on")
    elif run.footer.records != len(run.records):
        found.append(f"its footer counts {run.footer.records} records, {len(run.records)} were read")
    return found
