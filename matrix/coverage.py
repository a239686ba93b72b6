"""Which cells are proven: the space's cells against the ledger's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from matrix.cell import Cell
from matrix.est_time import EstTimes
from matrix.ledger import LedgerContents, Record

NOT_RUN = "not run"
#: From best to worst; a cell is what its worst row is.
STATUSES = ("passed", "skipped", NOT_RUN, "failed", "error")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A cell's latest result on one machine kind, for one target; or that it was never run.

    `layout_hashes`: one a rank. `seconds`: the whole class, launch and teardown included; `est_time`: what was
    estimated for it on that machine kind. `age_seconds`: since it ended.
    """

    cell: str
    model: str
    layout: str
    mode: str
    transport: str
    status: str
    layout_hashes: tuple[str, ...] = ()
    seconds: float | None = None
    est_time: float | None = None
    machine: str | None = None
    device: str | None = None
    target: str | None = None
    target_version: str | None = None
    revision: str | None = None
    age_seconds: float | None = None
    requirements: dict[str, str] = {}
    reason: str = ""


class Totals(msgspec.Struct, frozen=True):
    """How many cells there are, how many of each status, and how many requirements of each outcome, over all rows."""

    cells: int
    statuses: dict[str, int]
    requirements: dict[str, int]


class Coverage(msgspec.Struct, frozen=True):
    """The table. `problems`: what the reader must know before believing it; each is one line."""

    rows: tuple[Row, ...]
    totals: Totals
    problems: tuple[str, ...]


def cover(
    cells: Sequence[Cell],
    contents: LedgerContents,
    now: datetime,
    known: Iterable[str] | None = None,
    est_times: EstTimes | None = None,
) -> Coverage:
    """Return the coverage of these cells, in their order: a row a machine kind and target, or one that says `not run`.

    The latest record of a cell, machine kind and target is the one that counts: an older pass never hides a later
    failure, nor the other way round. `known`: ids of the whole space (default: those of `cells`); records of any other cell
    become a problem. `est_times`: seconds by machine kind and class.
    """
    ids = {cell.id for cell in cells}
    known = ids.union(known or ())
    latest = _latest(contents.records)
    rows = []
    for cell in cells:
        found = [record for (name, _, _), record in latest.items() if name == cell.id]
        rows += [_row(cell, record, now, est_times or {}) for record in found] or [_never_run(cell)]
    strangers = sorted({record.cell for record in contents.records} - known)
    problems = [str(problem) for problem in contents.problems]
    problems += [f"the ledger has results of {cell}, which is no cell of the space" for cell in strangers]
    return Coverage(tuple(rows), _totals(rows), tuple(problems))


def _latest(records: Iterable[Record]) -> Mapping[tuple[str, str, str], Record]:
    """Return the latest record by cell, machine kind and target; of two of the same time, the one read last."""
    latest: dict[tuple[str, str, str], Record] = {}
    for record in sorted(records, key=lambda record: record.time):
        latest[record.cell, record.machine, record.target] = record
    return dict(sorted(latest.items()))


def _row(cell: Cell, record: Record, now: datetime, est_times: EstTimes) -> Row:
    return Row(
        cell=cell.id,
        model=cell.model,
        layout=cell.layout.short,
        mode=cell.mode,
        transport=cell.transport,
        status=_status(record),
        layout_hashes=tuple(record.layout_hashes),
        seconds=record.seconds.whole,
        est_time=est_times.get(record.machine, {}).get(cell.class_name),
        machine=record.machine,
        device=record.device,
        target=record.target,
        target_version=record.target_version,
        revision=record.revision,
        age_seconds=max(0.0, (now - record.time).total_seconds()),
        requirements=record.requirements,
        reason=record.reason,
    )


def _status(record: Record) -> str:
    """Return the worst of the record's outcome and of its requirements' that say `failed` or `error`."""
    said = {record.outcome, *(outcome for outcome in record.requirements.values() if outcome in ("failed", "error"))}
    return max(said, key=STATUSES.index)


def _never_run(cell: Cell) -> Row:
    return Row(
        cell=cell.id,
        model=cell.model,
        layout=cell.layout.short,
        mode=cell.mode,
        transport=cell.transport,
        status=NOT_RUN,
    )


def _totals(rows: Sequence[Row]) -> Totals:
    worst: dict[str, str] = {}
    for row in rows:
        worst[row.cell] = max(row.status, worst.get(row.cell, row.status), key=STATUSES.index)
    statuses = Counter(worst.values())
    requirements = Counter(outcome for row in rows for outcome in row.requirements.values())
    return Totals(len(worst), {status: statuses[status] for status in STATUSES}, dict(sorted(requirements.items())))
