"""Which readings of a class an estimate is made from: the newest usable ones of its present level, without strays.

A *shift* is a lasting change (a commit made the class slower); a *stray* is one reading far off. They are told apart by
what follows: the newest readings must agree on the new level, and both levels must keep to their own side of the middle.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from ci.policy import Policy
from ci.quantile import robust_sigma
from ci.readings import Reading


@dataclass(frozen=True)
class LeftOut:
    """A reading that an estimate isn't made from, and why. `passing`: it is a true time of a run that passed."""

    reading: Reading
    why: str
    passing: bool = False


@dataclass(frozen=True)
class Shift:
    """A change of level: medians in seconds before and after, and the first reading at the new level."""

    before: float
    after: float
    first: Reading


@dataclass(frozen=True)
class Chosen:
    """`used`, oldest first; `left_out` in the order of time; the `shift` that `used` came after, if there was one."""

    used: tuple[Reading, ...]
    left_out: tuple[LeftOut, ...]
    shift: Shift | None


def choose(readings: Sequence[Reading], as_of: datetime, policy: Policy) -> Chosen:
    """Sort the readings of one class on one machine kind into those that count and those that don't.

    The order of `readings` makes no difference. Raises ValueError for more than one class or machine kind, and for an
    `as_of` without time zone.
    """
    _check_one_class(readings)
    if as_of.tzinfo is None:
        raise ValueError(f"as_of {as_of} has no time zone")
    out: list[LeftOut] = []
    usable: list[Reading] = []
    for reading in sorted(set(readings), key=_order):
        why = _unusable(reading, as_of, policy)
        if why:
            out.append(LeftOut(reading, why))
        else:
            usable.append(reading)
    usable = _keep_apart(usable, _cold(usable), policy.min_readings, out)
    usable = _keep_apart(usable, _busy(usable, policy), policy.min_readings, out)
    for reading in usable[: -policy.window]:
        out.append(LeftOut(reading, f"older than the newest {policy.window}"))
    usable = usable[-policy.window :]

    shift = None
    split = latest_shift([reading.seconds.whole for reading in usable], policy)
    if split:
        before, usable = usable[:split], usable[split:]
        shift = Shift(_median(before), _median(usable), usable[0])
        out += [LeftOut(reading, f"before the shift to {shift.after:.3g} s") for reading in before]
    usable = _keep_apart(usable, _strays(usable, policy), policy.min_readings, out)
    oldest = usable[0].time if usable else as_of
    # A passing time from before the window or the shift says nothing of today's slowest run.
    out = [LeftOut(one.reading, one.why, one.passing and one.reading.time >= oldest) for one in out]
    return Chosen(tuple(usable), tuple(sorted(out, key=lambda one: _order(one.reading))), shift)


def latest_shift(values: Sequence[float], policy: Policy) -> int | None:
    """Return where the present level begins in a series of seconds (all above 0, oldest first); None if it never changed."""
    logs = [math.log(value) for value in values]
    # Noise as neighbours differ by it: of the whole series, and hardly moved by its shifts.
    steps = [after - before for before, after in pairwise(logs)]
    noise = max(robust_sigma(steps) / math.sqrt(2), policy.noise_floor)
    level = begin = 0
    while begin < len(logs):
        if split := _split(logs[begin:], noise, policy):
            level = begin = begin + split
        else:
            begin += 1  # two levels may be seen only without the oldest readings, which are of a third
    return level or None


def _split(logs: Sequence[float], noise: float, policy: Policy) -> int | None:
    """Return the acceptable split with the smallest sum of distances from both medians."""
    costs = {}
    for at in range(policy.min_readings, len(logs) - policy.sudden_readings + 1):
        left, right = logs[:at], logs[at:]
        old, new = statistics.median(left), statistics.median(right)
        # In units of the noise, a median's error against a mean's is 1.25.
        error = 1.25 * math.sqrt(1 / len(left) + 1 / len(right))
        if abs(new - old) < max(math.log1p(policy.shift_fraction), policy.shift_sigmas * error * noise):
            continue
        rests = [*(one - old for one in left), *(one - new for one in right)]
        # Each side's median is fitted, so that two of the rests are 0 without any merit.
        sigma = max(robust_sigma(rests) * len(rests) / (len(rests) - 2), noise)
        if abs(new - old) >= policy.shift_sigmas * error * sigma and _apart(left, right, sigma, policy):
            costs[at] = sum(map(abs, rests))
    return min(costs, key=lambda at: (costs[at], at)) if costs else None


def _apart(left: Sequence[float], right: Sequence[float], sigma: float, policy: Policy) -> bool:
    """Return whether two parts of a series of logarithms keep to their own side of the middle; two need agree, and be up."""
    old, new = statistics.median(left), statistics.median(right)
    if len(right) < policy.shift_readings:
        agree = max(right) - min(right) < policy.outlier_sigmas * sigma
        if new - old < math.log1p(policy.sudden_fraction) or not agree:
            return False
    sign = math.copysign(1, new - old)
    middle = (old + new) / 2
    beyond = sum((one - middle) * sign > 0 for one in right) / len(right)
    behind = sum((one - middle) * sign < 0 for one in left) / len(left)
    return min(beyond, behind) >= policy.shift_share


def _unusable(reading: Reading, as_of: datetime, policy: Policy) -> str | None:
    """Return why a reading is no measurement of the class's time, or None."""
    tolerance = timedelta(seconds=policy.clock_tolerance)
    seconds = reading.seconds
    stages = (seconds.launch, seconds.tests, seconds.teardown)
    if reading.outcome != "passed":
        return reading.outcome
    if reading.attempt > 1:
        return f"attempt {reading.attempt}: a retried run"
    if not all(map(math.isfinite, (*stages, seconds.whole))):
        return "seconds that are no number"
    if seconds.whole <= 0 or min(stages) < 0:
        return f"{min(seconds.whole, *stages):.4g} s: not above 0"
    if reading.time > as_of + tolerance:
        return f"its clock is ahead: {reading.time:%Y-%m-%d %H:%M} is after {as_of:%Y-%m-%d %H:%M}"
    if reading.run_began and reading.time < reading.run_began - tolerance:
        return f"its clock went back: it ended before its run began ({reading.run_began:%Y-%m-%d %H:%M})"
    return None


def _cold(readings: Sequence[Reading]) -> dict[Reading, str]:
    return {reading: "cold cache" for reading in readings if reading.warm is False}


def _busy(readings: Sequence[Reading], policy: Policy) -> dict[Reading, str]:
    loads = [reading.load for reading in readings if reading.load is not None]
    if not loads:
        return {}
    usual = statistics.median(loads)
    return {
        reading: f"busy machine: load {reading.load:.2g} a core, usually {usual:.2g}"
        for reading in readings
        if reading.load is not None and reading.load > usual + policy.busy_load
    }


def _strays(readings: Sequence[Reading], policy: Policy) -> dict[Reading, str]:
    if len(readings) < policy.enough_readings:
        return {}
    logs = {reading: math.log(reading.seconds.whole) for reading in readings}
    middle = statistics.median(logs.values())
    sigma = max(robust_sigma([one - middle for one in logs.values()]), policy.noise_floor)
    limit = max(math.log1p(policy.outlier_fraction), policy.outlier_sigmas * sigma)
    found = [reading for reading, one in logs.items() if abs(one - middle) > limit]
    if len(found) > policy.outlier_share * len(readings):
        return {}
    return {one: f"a stray: {one.seconds.whole:.3g} s, others about {math.exp(middle):.3g} s" for one in found}


def _keep_apart(readings: list[Reading], apart: dict[Reading, str], at_least: int, out: list[LeftOut]) -> list[Reading]:
    """Return the readings without those kept apart; all of them where too few would be left."""
    kept = [reading for reading in readings if reading not in apart]
    if len(kept) < at_least:
        return readings
    out += [LeftOut(reading, why, passing=True) for reading, why in apart.items()]
    return kept


def _check_one_class(readings: Iterable[Reading]) -> None:
    for what in ("class_name", "machine"):
        names = sorted({getattr(reading, what) for reading in readings})
        if len(names) > 1:
            raise ValueError(f"readings of {len(names)} {what}s ({', '.join(names)}); an estimate is of one")


def _median(readings: Sequence[Reading]) -> float:
    return statistics.median(reading.seconds.whole for reading in readings)


def _order(reading: Reading) -> tuple[datetime, str, float]:
    return (reading.time, reading.run, reading.seconds.whole)
