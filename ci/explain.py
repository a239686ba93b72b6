"""The readings of a class as a small chart: each with its length, whether it was used, and why not."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ci.calibration import Row
from ci.estimate import shown
from ci.readings import Reading

#: Columns of the bars. A bar that is longer than twice the estimate is cut, and ends in `>`.
WIDTH = 40
BAR, SHADE, MARK = "\u2588", "\u2591", "\u2502"  # used, left out, the estimate
_PLAIN = str.maketrans(BAR + SHADE + MARK, "#-|")


def explain(rows: Sequence[Row], *, plain: bool = False) -> str:
    """Return the charts of one class on each machine kind; `plain` for a terminal that shows ASCII alone."""
    text = "\n".join(_chart(row) for row in rows)
    return text.translate(_PLAIN) if plain else text


def wants_plain() -> bool:
    """Whether standard output can't show block characters."""
    try:
        (BAR + SHADE + MARK).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return True
    return False


def _chart(row: Row) -> str:
    estimate = row.new
    head = f"{row.class_name} on {row.machine}: "
    if estimate is None:
        head += "no estimate"
    else:
        head += f"est_time {shown(estimate.est_time)}, time-out {estimate.timeout or '-'} s ({estimate.state})"
    lines = [head]
    if estimate and estimate.launch is not None:
        lines.append(f"  launch {shown(estimate.launch)}, tests {shown(estimate.tests)}, each estimated by itself")
    if estimate and estimate.why:
        lines.append(f"  last changed {estimate.changed or 'at an unknown date'}: {estimate.why}")
    if row.old != row.new:
        lines.append(f"  not written yet; the file has {shown(row.old.est_time) if row.old else 'nothing'}")
    lines += [f"  check: {text}" for text in row.findings]
    reasons = {one.reading: one.why for one in row.chosen.left_out}
    readings = sorted([*row.chosen.used, *reasons], key=lambda one: (one.time, one.run))
    if not readings:
        return "\n".join([*lines, "  no readings", ""])
    central = estimate.est_time if estimate else max(one.seconds.whole for one in readings)
    full = 2 * central
    lines.append(f"  {'time (UTC)':16} {'revision':13} {'seconds':>9}  {MARK} marks est_time")
    lines += [f"  {_line(one, reasons.get(one), central, full)}" for one in readings]
    lines.append(f"  {len(row.chosen.used)} used, {len(reasons)} left out")
    return "\n".join([*lines, ""])


def _line(reading: Reading, reason: str | None, central: float, full: float) -> str:
    seconds = reading.seconds.whole
    length = min(max(round(WIDTH * seconds / full), 0), WIDTH) if seconds == seconds else 0
    bar = list(((SHADE if reason else BAR) * length).ljust(WIDTH))
    if seconds > full:
        bar[-1] = ">"
    at = min(round(WIDTH * central / full), WIDTH - 1)
    bar[at] = MARK
    when = reading.time.strftime("%Y-%m-%d %H:%M")
    return f"{when} {reading.revision[:13]:13} {seconds:9.2f}  {''.join(bar)}  {reason or 'used'}"
