"""Where readings come from: files, directories, standard input. What a file is, its content says, not its name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ci.other_suites import Origin, OtherSuiteError, Unit, read_durations, read_junit, read_reportlog
from ci.readings import Reading, readings_of
from matrix import ledger

#: What is read of a directory, and of those below it: ledgers and report logs, JUnit XML, pytest-split's default file.
PATTERNS = ("*.jsonl", "*.xml", ".test_durations")
_REPORT_LOG = re.compile(rb'\{[^\n]*"\$report_type"')
_LEDGER = re.compile(rb'\{[^\n]*"type":\s*"(header|record|footer)"')


class SourceError(Exception):
    """Readings that can't be had; the text is one line: which file, what is wrong, what to do."""


@dataclass(frozen=True)
class Gathered:
    """All readings, in the order of their sources; what was lost or cut, a line each; how many files were read."""

    readings: tuple[Reading, ...]
    problems: tuple[str, ...]
    files: int


def gather(paths: Sequence[str], as_of: datetime, machine: str | None, unit: Unit = "class") -> Gathered:
    """Read the readings of files, directories (all that match `PATTERNS`, at any depth) and `-`, standard input.

    `machine` is the kind of the machine for files that name none; of a ledger, which does, readings of other kinds are
    kept. Raises `SourceError`.
    """
    ledgers: list[tuple[str, bytes]] = []
    readings: list[Reading] = []
    names = list(_expand(paths))
    for name in names:
        data = _content(name)
        kind = kind_of(data)
        if kind == "ledger":
            ledgers.append((name, data))
        elif kind is None:
            raise SourceError(f"{name}: no ledger, JUnit XML, pytest-reportlog or pytest-split file")
        elif machine is None:
            raise SourceError(f"{name}: a {kind} file names no machine; say which kind it is of with --machine KIND")
        else:
            reader = {"JUnit XML": read_junit, "pytest-reportlog": read_reportlog, "pytest-split": read_durations}[kind]
            try:
                readings += reader(data, Origin(name, machine, as_of, unit))
            except OtherSuiteError as error:
                raise SourceError(str(error)) from error
    try:
        contents = ledger.parse(ledgers)
    except ledger.LedgerError as error:
        raise SourceError(str(error)) from error
    if ledgers and not contents.runs and contents.problems:
        raise SourceError(f"{contents.problems[0]}; and no line of any ledger can be read")
    return Gathered((*readings_of(contents), *readings), tuple(map(str, contents.problems)), len(names))


def kind_of(data: bytes) -> str | None:
    """Return what a file's content is; an empty file is an empty ledger. None where it is nothing that is known."""
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"<"):
        return "JUnit XML"
    if _REPORT_LOG.match(text):
        return "pytest-reportlog"
    if not text or _LEDGER.search(text):
        return "ledger"
    # pytest-split writes an object of numbers, and nothing else is one.
    return "pytest-split" if re.match(rb'\{\s*("|\})', text) and text.rstrip().endswith(b"}") else None


def _expand(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        if path != "-" and Path(path).is_dir():
            found = sorted({str(one) for pattern in PATTERNS for one in Path(path).rglob(pattern) if one.is_file()})
            if not found:
                raise SourceError(f"{path}: holds no {', '.join(PATTERNS)}, at any depth")
            yield from found
        else:
            yield path


def _content(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise SourceError(f"{name}: {error.strerror}") from error
