"""From all readings and the estimates there are to the estimates there should be, and what to say of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime

from ci.est_time_file import EstTimes
from ci.estimate import Estimate, estimate_from, percent, rounded, shown, timeout_class
from ci.level import Chosen, choose
from ci.parameter_model import Fit, Parameters, fit, predict
from ci.policy import DEFAULT_POLICY, Policy
from ci.readings import Reading, by_class, machines


class NothingUsable(Exception):
    """There is no reading that an estimate could be made from; the text is one line that says what there was."""


@dataclass(frozen=True)
class Row:
    """What is said of one class on one machine kind.

    `old`, `new`: its estimates before and after; None where there is none. `fresh`: what its readings say without regard
    to `old`; None where none is usable. `chosen`: which readings those are. `findings`: what `--check` complains of.
    """

    machine: str
    class_name: str
    old: Estimate | None
    new: Estimate | None
    fresh: Estimate | None
    chosen: Chosen
    findings: tuple[str, ...] = ()

    @property
    def moved(self) -> bool:
        """Whether one of its two numbers is another, came, or went."""
        return _numbers(self.old) != _numbers(self.new)

    @property
    def drift(self) -> float | None:
        """How far the readings' percentile is from the old number: 0.1 is 10 % above it. None without either."""
        if self.old is None or self.fresh is None or self.fresh.p75 is None:
            return None
        return self.fresh.p75 / self.old.est_time - 1


@dataclass(frozen=True)
class Calibration:
    """`rows` by machine kind and class; `times`, the estimates that follow; `fits`, for classes never run, by machine kind."""

    rows: tuple[Row, ...]
    times: EstTimes
    fits: Mapping[str, Fit]
    as_of: datetime

    @property
    def findings(self) -> tuple[str, ...]:
        """All complaints, each a line that names machine kind and class."""
        return tuple(f"{row.machine} {row.class_name}: {text}" for row in self.rows for text in row.findings)


def calibrate(
    readings: Iterable[Reading],
    as_of: datetime,
    previous: Mapping[str, Mapping[str, Estimate]],
    parameters: Mapping[str, Parameters],
    policy: Policy = DEFAULT_POLICY,
    machine: str | None = None,
) -> Calibration:
    """Return new estimates for every machine kind that has readings or estimates, or for `machine` alone.

    `parameters`: those of each class of the suite; classes among them without readings get an estimate by `fit`. A pure
    function. Raises `NothingUsable` where no reading can be used: estimates must not change for want of data.
    """
    readings = tuple(readings)
    kinds = sorted({*machines(readings), *previous} if machine is None else {machine})
    rows: list[Row] = []
    fits: dict[str, Fit] = {}
    for kind in kinds:
        found = _measured_rows(kind, by_class(readings, kind), as_of, previous.get(kind, {}), parameters, policy)
        predicted, fitted = _predicted_rows(found, parameters, as_of.date(), policy)
        if fitted:
            fits[kind] = fitted
        rows += sorted([*found, *predicted], key=lambda row: row.class_name)
    if not any(row.fresh for row in rows):
        raise NothingUsable(_nothing(readings, machine, rows))
    times: EstTimes = {kind: dict(classes) for kind, classes in previous.items() if kind not in kinds}
    for row in rows:
        if row.new:
            times.setdefault(row.machine, {})[row.class_name] = row.new
    return Calibration(tuple(rows), times, fits, as_of)


def row_of(
    machine: str,
    class_name: str,
    readings: Sequence[Reading],
    as_of: datetime,
    old: Estimate | None,
    policy: Policy = DEFAULT_POLICY,
) -> Row:
    """Return the row of one class from its readings, with what `--check` finds."""
    chosen = choose(readings, as_of, policy)
    row = Row(
        machine=machine,
        class_name=class_name,
        old=old,
        new=estimate_from(chosen, as_of, policy, old),
        fresh=estimate_from(chosen, as_of, policy),
        chosen=chosen,
    )
    return replace(row, findings=tuple(_findings(row, as_of.date(), policy)))


def _measured_rows(
    machine: str,
    readings: Mapping[str, Sequence[Reading]],
    as_of: datetime,
    old: Mapping[str, Estimate],
    parameters: Mapping[str, Parameters],
    policy: Policy,
) -> list[Row]:
    rows = []
    for name in sorted({*readings, *old}):
        row = row_of(machine, name, readings.get(name, ()), as_of, old.get(name), policy)
        if name not in parameters and _is_gone(row, as_of.date(), policy):
            if row.old is None:
                continue
            row = replace(row, new=None, findings=())
        rows.append(row)
    return rows


def _predicted_rows(
    rows: list[Row], parameters: Mapping[str, Parameters], today: date, policy: Policy
) -> tuple[list[Row], Fit | None]:
    """Take the rows that only a model can fill out of `rows`, and return them filled, with classes that had no row."""
    known = {row.class_name: row for row in rows}
    measured = [
        (parameters[name], row.new) for name, row in known.items() if row.fresh and row.new and name in parameters
    ]
    whole = fit([(one, est.est_time) for one, est in measured], policy)
    if whole is None:
        return [], None
    launch = fit([(one, est.launch) for one, est in measured if est.launch is not None], policy)
    tests = fit([(one, est.tests) for one, est in measured if est.tests is not None], policy)
    machine = rows[0].machine
    found = []
    for name, one in parameters.items():
        row = known.get(name)
        if row and (row.fresh or (row.old and row.old.state != "modelled")):
            continue
        old = row.old if row else None
        new = _modelled(one, whole, launch, tests, today, policy)
        if old and abs(new.est_time - old.est_time) <= policy.model_change_fraction * old.est_time:
            new = old
        found.append(Row(machine, name, old, new, None, row.chosen if row else Chosen((), (), None)))
        if row:
            rows.remove(row)
    return found, whole


def _modelled(
    one: Parameters, whole: Fit, launch: Fit | None, tests: Fit | None, today: date, policy: Policy
) -> Estimate:
    guess = predict(whole, one)
    widening = whole.upper * (policy.model_outside_widening if guess.outside else 1.0)
    why = (
        f"never run: {shown(guess.seconds)} by least squares over {whole.classes} classes (error {percent(whole.median_error)} "
        f"median, {percent(whole.worst_error)} worst, leave-one-out); widened by {percent(widening - 1)}"
    )
    if guess.outside:
        why += f"; outside what was measured in {', '.join(guess.outside)}"
    needed = policy.timeout_factor * guess.seconds * max(widening, whole.worst)
    return Estimate(
        est_time=rounded(guess.seconds * widening),
        timeout=timeout_class(needed, policy),
        launch=round(predict(launch, one).seconds * widening, 2) if launch else None,
        tests=round(predict(tests, one).seconds * widening, 2) if tests else None,
        state="modelled",
        changed=today,
        why=why,
    )


def _findings(row: Row, today: date, policy: Policy) -> Iterable[str]:
    """Yield what the policy does not allow; a prediction, or a class with too few readings, has nothing to hold it to."""
    old, fresh = row.old, row.fresh
    if old is None:
        if fresh and fresh.state != "few":
            yield f"has {fresh.readings} readings and no estimate; it takes {shown(fresh.est_time)}"
        return
    last = max((one for one in (old.last, fresh.last if fresh else None) if one), default=None)
    if last and (today - last).days > policy.stale_days:
        yield f"stale: the last reading is of {last}, {(today - last).days} days ago; {policy.stale_days} are allowed"
    if not fresh or fresh.state == "few":
        return
    room = max(policy.off_fraction * old.est_time, policy.off_seconds)
    if abs(fresh.est_time - old.est_time) > room:
        yield f"off: est_time is {shown(old.est_time)}, readings say {shown(fresh.est_time)} ({fresh.why})"
    if old.timeout and fresh.p90 and old.timeout < fresh.p90 * policy.timeout_margin:
        yield f"time-out too low: {old.timeout} s, nine in ten runs take up to {shown(fresh.p90)}"


def _is_gone(row: Row, today: date, policy: Policy) -> bool:
    """Return whether a class that the suite doesn't have (any more) was last seen too long ago to be another suite's."""
    dates = [row.old.last if row.old else None, row.fresh.last if row.fresh else None]
    last = max((one for one in dates if one), default=None)
    return last is None or (today - last).days > policy.forget_days


def _numbers(one: Estimate | None) -> tuple[float, int] | None:
    return (one.est_time, one.timeout) if one else None


def _nothing(readings: Sequence[Reading], machine: str | None, rows: Sequence[Row]) -> str:
    reasons: dict[str, int] = {}
    for row in rows:
        for left in row.chosen.left_out:
            reason = left.why.split(":")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
    counted = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    where = f" of {machine}" if machine else ""
    kinds = ", ".join(machines(readings))
    if not readings:
        return "no readings: the ledgers hold no record of a class; run the suite first (`pytest conformance`)"
    if not counted:
        return f"no readings{where}: the ledgers hold {len(readings)} of {kinds}"
    return f"no usable reading{where}: {counted}; estimates need runs that passed"
