"""Readings and ledgers for the self-tests of `ci/`, made from a few numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ci.readings import Reading
from matrix.cell import Cell
from matrix.generate import cells
from matrix.ledger import Footer, Header, Ledger, Record, Seconds
from matrix.space import load_space

START = datetime(2026, 10, 1, 4, tzinfo=UTC)
AS_OF = datetime(2026, 12, 1, tzinfo=UTC)
KIND = "nvidia-h200"


def stages(whole: float) -> Seconds:
    """Half of it launch, four tenths tests, the rest teardown."""
    return Seconds(launch=whole * 0.5, tests=whole * 0.4, teardown=whole * 0.1, whole=whole)


def reading(whole: float, day: float = 0, **fields: object) -> Reading:
    given = {
        "class_name": "TestX",
        "machine": KIND,
        "outcome": "passed",
        "seconds": stages(whole),
        "time": START + timedelta(days=day),
        "revision": f"rev{day:g}",
        "run": f"run{day:g}",
    }
    return Reading(**(given | fields))  # type: ignore[arg-type]


def series(*seconds: float, **fields: object) -> list[Reading]:
    """One reading a day."""
    return [reading(whole, day, **fields) for day, whole in enumerate(seconds)]


def write_ledger(
    path: Path, runs: Iterable[Mapping[str, float]], *, machine: str = KIND, outcome: str = "passed", day: int = 0
) -> Path:
    """Append runs, a day apart: seconds by class name each. Classes must be of the space's cells."""
    by_name = {cell.class_name: cell for cell in cells(load_space())}
    ledger = Ledger(path)
    for number, seconds in enumerate(runs, day):
        time, run = START + timedelta(days=number), f"{machine}-{number}"
        common = {"run": run, "revision": f"rev{number}", "machine": machine, "device": "cpu", "target": "reference"}
        ledger.append(Header(time=time, target_version="1", **common))
        for name, whole in seconds.items():
            ledger.append(_record(by_name[name], whole, time + timedelta(minutes=5), outcome, common))
        ledger.append(Footer(run=run, time=time + timedelta(hours=1), records=len(seconds), exit_status=0))
    return path


def _record(cell: Cell, whole: float, time: datetime, outcome: str, common: Mapping[str, str]) -> Record:
    return Record(
        cell=cell.id,
        class_name=cell.class_name,
        outcome=outcome,  # type: ignore[arg-type]
        target_version="1",
        requirements={},
        layout_hashes=[],
        digests_digest=[],
        seconds=stages(whole),
        world_size=cell.layout.world_size,
        transport=cell.transport,
        mode=cell.mode,
        model=cell.model,
        time=time,
        **common,
    )
