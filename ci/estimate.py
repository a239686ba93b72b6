"""From the readings of one class on one machine kind to its two numbers: `est_time` for packing, `timeout` for hangs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Literal

from ci.level import Chosen, choose
from ci.policy import DEFAULT_POLICY
from ci.policy import Policy as Policy
from ci.quantile import quantile
from ci.readings import Reading

State = Literal["measured", "shifted", "few", "modelled", "declared"]


@dataclass(frozen=True)
class Estimate:
    """What is expected of one class on one machine kind. Times are seconds.

    `est_time`: to pack by. `timeout`: when to take it for hung; 0 where nobody said. `launch`, `tests`: what starting
    processes and what testing takes, each estimated by itself; None where no reading told. `state`: `measured` from
    enough readings; `shifted`, measured since its level changed; `few`, fewer readings than the policy wants;
    `modelled`, never run, from other classes; `declared`, a number typed by hand. `readings`: how many it was made from;
    `p50`, `p75`, `p90` their quantiles, `spread` their interquartile range over the median, `first` and `last` their
    dates (UTC). `changed`: when `est_time` or `timeout` last moved, and `why`. `shifted_by`: the first revision that was
    seen at the present level.
    """

    est_time: float
    timeout: int
    launch: float | None = None
    tests: float | None = None
    state: State = "declared"
    readings: int = 0
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    spread: float | None = None
    first: date | None = None
    last: date | None = None
    changed: date | None = None
    why: str = ""
    shifted_by: str | None = None


def estimate(
    readings: Sequence[Reading],
    as_of: datetime,
    policy: Policy = DEFAULT_POLICY,
    previous: Estimate | None = None,
) -> Estimate | None:
    """Return the estimate of one class on one machine kind: `previous` itself where nothing moved past the policy.

    A pure function; the order of `readings` makes no difference. Without a usable reading it is `previous`, or None; so
    it is with fewer than `policy.min_readings` where `previous` stands on more, or was typed by hand. Raises ValueError
    for readings of several classes or machine kinds, and for an `as_of` without time zone.
    """
    return estimate_from(choose(readings, as_of, policy), as_of, policy, previous)


def estimate_from(
    chosen: Chosen, as_of: datetime, policy: Policy = DEFAULT_POLICY, previous: Estimate | None = None
) -> Estimate | None:
    """Return the estimate that `choose`'s answer gives; otherwise as `estimate`."""
    count = len(chosen.used)
    if not count or (_too_few(chosen, policy) and previous is not None and previous.state not in ("few", "modelled")):
        return previous
    new = _measure(chosen, as_of.date(), policy, previous.timeout if previous else None)
    if previous is None:
        return replace(new, why=f"first estimate: {new.why}")
    return _settle(new, previous, policy)


def timeout_class(needed: float, policy: Policy = DEFAULT_POLICY, previous: int | None = None) -> int:
    """Return the time-out in seconds: `needed` rounded up to a class, and one that is `previous` kept where it's near."""
    found = _round_up(needed, policy)
    if previous is not None and found < previous:
        return min(previous, _round_up(needed / policy.timeout_lower, policy))
    return found


def rounded(seconds: float) -> float:
    """Return seconds as an estimate is kept: to 0.1 below 100 and at least that, to 1 above."""
    return max(0.1, round(seconds, 1)) if seconds < 100 else float(round(seconds))


def shown(seconds: float | None) -> str:
    """Return seconds for a reader: `4.2 s`, `301 s`; a dash for None."""
    return "-" if seconds is None else f"{rounded(seconds):g} s"


def percent(part: float, *, signed: bool = False) -> str:
    """Return a fraction for a reader: `5 %`, signed `+5 %`."""
    return f"{100 * part:+.0f} %" if signed else f"{100 * part:.0f} %"


def _measure(chosen: Chosen, today: date, policy: Policy, timeout: int | None) -> Estimate:
    """Return the estimate of readings (one or more), whatever it was before but for the `timeout` that it is near to."""
    used = chosen.used
    count = len(used)
    small = _too_few(chosen, policy)
    whole = [reading.seconds.whole for reading in used]
    part = policy.est_percentile
    middle, upper = quantile(whole, part), quantile(whole, policy.timeout_percentile)
    if small:
        widening = policy.below_min_widening / count
        middle = max(whole)
    else:
        widening = policy.few_widening / count if count < policy.enough_readings else 0.0
    slowest = max((one.reading.seconds.whole for one in chosen.left_out if one.passing), default=0.0)
    needed = max(policy.timeout_factor * upper * (1 + widening * small), policy.timeout_margin * slowest)
    staged = any(reading.seconds.launch for reading in used)
    median = quantile(whole, 0.5)
    return Estimate(
        est_time=rounded(middle * (1 + widening)),
        timeout=timeout_class(needed, policy, timeout),
        launch=_stage([one.seconds.launch for one in used], part, widening) if staged else None,
        tests=_stage([one.seconds.tests for one in used], part, widening),
        state="few" if small else "shifted" if chosen.shift else "measured",
        readings=count,
        p50=_kept(median),
        p75=_kept(quantile(whole, 0.75)),
        p90=_kept(quantile(whole, 0.90)),
        spread=round((quantile(whole, 0.75) - quantile(whole, 0.25)) / median, 3),
        first=used[0].time.date(),
        last=used[-1].time.date(),
        changed=today,
        why=_reason(chosen, middle, widening, small, policy),
        shifted_by=chosen.shift.first.revision if chosen.shift else None,
    )


def _too_few(chosen: Chosen, policy: Policy) -> bool:
    # A shift brings its own proof, from the readings before it.
    return len(chosen.used) < policy.min_readings and chosen.shift is None


def _reason(chosen: Chosen, middle: float, widening: float, small: bool, policy: Policy) -> str:
    whole = sorted(reading.seconds.whole for reading in chosen.used)
    count = len(whole)
    text = f"{count} readings of {shown(whole[0])} to {shown(whole[-1])}"
    if count == 1:
        text = f"1 reading of {shown(whole[0])}"
    if not small:
        text += f", of which the {policy.est_percentile * 100:.0f}th percentile is {shown(middle)}"
    if widening:
        text += f"; widened by {percent(widening)} since there {'is' if count == 1 else 'are'} only {count}"
    if chosen.shift:
        shift = chosen.shift
        change = shift.after / shift.before - 1
        text = (
            f"level shift from {shown(shift.before)} to {shown(shift.after)} ({percent(change, signed=True)}), first seen at "
            f"revision {shift.first.revision or 'unknown'} on {shift.first.time.date()}; {text}"
        )
    return text


def _settle(new: Estimate, old: Estimate, policy: Policy) -> Estimate:
    """Return what is kept: the old estimate, its numbers with new statistics, or the new estimate."""
    interquartile = (new.spread or 0.0) * (new.p50 or 0.0)
    room = max(policy.change_fraction * old.est_time, policy.change_seconds, policy.change_spread * interquartile)
    moved = abs(new.est_time - old.est_time) > room
    # A number that was widened for want of readings is a guess: it gives way to the first that is measured, however near.
    guessed = old.state in ("few", "modelled") and new.state not in ("few", "modelled")
    if moved or (guessed and new.est_time != old.est_time):
        change = percent(new.est_time / old.est_time - 1, signed=True)
        step = f"{shown(old.est_time)} -> {shown(new.est_time)} ({change})"
        return replace(new, why=f"{step}: {new.why}")
    kept = replace(new, est_time=old.est_time, changed=old.changed, why=old.why, shifted_by=old.shifted_by)
    if new.timeout != old.timeout and old.state != "declared":
        return replace(kept, changed=new.changed, why=f"time-out {old.timeout} s -> {new.timeout} s: {new.why}")
    settled = old.state in ("few", "modelled", "declared") and new.state not in ("few", "modelled")
    behind = old.last is not None and new.last is not None and (new.last - old.last).days >= policy.refresh_days
    return kept if settled or behind else old


def _stage(values: Sequence[float], part: float, widening: float) -> float:
    return round(quantile(values, part) * (1 + widening), 2)


def _kept(seconds: float) -> float:
    return round(seconds, 2)


def _round_up(needed: float, policy: Policy) -> int:
    for limit in policy.timeout_classes:
        if needed <= limit:
            return limit
    return math.ceil(needed / 3600) * 3600
