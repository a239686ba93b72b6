"""Calibrate a suite that keeps its estimates in its test sources, as SGLang does: match readings to files, rewrite numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from ci.calibration import Calibration, NothingUsable, Row, row_of
from ci.est_time_file import write_whole
from ci.estimate import Estimate
from ci.policy import DEFAULT_POLICY, Policy
from ci.readings import Reading, by_class
from ci.registrations import Registration, RegistrationError, set_est_times

#: The backend of a machine kind, by how its name begins.
_BACKENDS = {"cpu": "cpu", "nvidia": "cuda", "amd": "amd", "ascend": "npu", "intel": "xpu", "apple": "mlx"}


@dataclass(frozen=True)
class SuiteCalibration:
    """`rows` as of any calibration, named by file; `values`, the numbers to write for the registrations that move."""

    calibration: Calibration
    values: dict[Registration, int | float]


def backend_of(machine: str) -> str:
    """Return the backend whose registrations a machine kind's readings are for. Raises `RegistrationError`."""
    for start, backend in _BACKENDS.items():
        if machine.startswith(start):
            return backend
    raise RegistrationError(
        f"--machine {machine}: which register_*_ci calls it is for can't be told; say so with --backend "
        f"({', '.join(sorted(set(_BACKENDS.values())))})"
    )


def select(registrations: Iterable[Registration], backend: str, suite: str | None) -> tuple[Registration, ...]:
    """Return the registrations to calibrate: one a file. Raises `RegistrationError`, also where none is left.

    Those that are disabled don't run, so that they have no time.
    """
    offered = [one for one in registrations if one.backend == backend]
    chosen = [one for one in offered if not one.disabled and (suite is None or one.suite == suite)]
    if not chosen:
        suites = sorted({one.suite for one in offered if one.suite})
        there = f"suites of {backend} are {', '.join(suites)}" if suites else f"there is no register_{backend}_ci call"
        raise RegistrationError(f"nothing to calibrate for {backend}, suite {suite or '(any)'}: {there}")
    seen: dict[str, Registration] = {}
    for one in chosen:
        if one.path in seen:
            both = " and ".join(str(each.suite) for each in (seen[one.path], one))
            raise RegistrationError(
                f"{one.path}:{one.line}: two registrations for {backend} ({both}); choose with --suite"
            )
        seen[one.path] = one
    return tuple(chosen)


def calibrate_files(
    registrations: Sequence[Registration],
    readings: Iterable[Reading],
    machine: str,
    as_of: datetime,
    policy: Policy = DEFAULT_POLICY,
) -> SuiteCalibration:
    """Return new numbers for registrations from readings of whole files. Raises `NothingUsable`, `RegistrationError`.

    A reading belongs to the file that its path and the file's have as their common end. A number that was an int stays
    one, and is rounded up.
    """
    units = by_class(readings, machine)
    owners = {unit: _owner(unit, registrations) for unit in units}
    rows: list[Row] = []
    values: dict[Registration, int | float] = {}
    for one in registrations:
        own = [reading for unit, found in units.items() if owners[unit] == one for reading in found]
        # The same file may be named from other directories; it is one unit.
        own = [_renamed(reading, one.path) for reading in own]
        row = row_of(machine, one.path, own, as_of, Estimate(est_time=float(one.est_time), timeout=0), policy)
        rows.append(row)
        if row.new and row.new.est_time != one.est_time:
            whole = isinstance(one.est_time, int)
            values[one] = math.ceil(row.new.est_time) if whole else row.new.est_time
    if not any(row.fresh for row in rows):
        strange = ", ".join(sorted(unit for unit, owner in owners.items() if owner is None)[:3])
        raise NothingUsable(
            f"no usable reading of {machine} for any of {len(rows)} registered files"
            + (f"; readings are of other files: {strange}" if strange else "")
        )
    return SuiteCalibration(Calibration(tuple(rows), {}, {}, as_of), values)


def rewrite(values: dict[Registration, int | float]) -> tuple[str, ...]:
    """Write numbers to their files; return the files' names. Raises `RegistrationError` before any file is touched."""
    drafts = {}
    for path in sorted({one.path for one in values}):
        source = Path(path).read_bytes()
        drafts[path] = set_est_times(source, {one: value for one, value in values.items() if one.path == path})
    for path, draft in drafts.items():
        write_whole(Path(path), draft)
    return tuple(drafts)


def _owner(unit: str, registrations: Sequence[Registration]) -> Registration | None:
    parts = PurePosixPath(unit).parts
    scored = {one: _common_end(parts, Path(one.path).parts) for one in registrations}
    best = max(scored.values(), default=0)
    if not best:
        return None
    found = [one for one, score in scored.items() if score == best]
    if len(found) > 1:
        names = " and ".join(one.path for one in found[:2])
        raise RegistrationError(
            f"readings of {unit} may be of {names}; name files from the suite's directory in reports"
        )
    return found[0]


def _common_end(one: Sequence[str], two: Sequence[str]) -> int:
    """Return how many last parts of two paths are equal; 0 unless one path is the end of the other, or 2 parts are."""
    count = 0
    for left, right in zip(reversed(one), reversed(two), strict=False):
        if left != right:
            break
        count += 1
    return count if count in (len(one), len(two)) or count > 1 else 0


def _renamed(reading: Reading, name: str) -> Reading:
    return Reading(**{**vars(reading), "class_name": name})
