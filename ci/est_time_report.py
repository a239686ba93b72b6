"""The table of a calibration: for a pull request (Markdown), a terminal, a program (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Literal

import msgspec
from tabulate import tabulate

from ci.calibration import Calibration, Row
from ci.estimate import Estimate, percent, rounded
from ci.parameter_model import Fit
from ci.policy import DEFAULT_POLICY, Policy
from matrix.report.terminal import render_table

Format = Literal["terminal", "markdown", "json"]
COLUMNS = ("class", "old", "new", "readings", "p50", "p90", "drift", "launch", "tests", "time-out", "state")
LEFT = ("class", "state")


def render(calibration: Calibration, form: Format, policy: Policy = DEFAULT_POLICY) -> str:
    """Return a calibration as text that ends in a newline. Seconds without a unit; `-` where there is nothing."""
    if form == "json":
        return _json(calibration)
    return _markdown(calibration, policy) if form == "markdown" else _terminal(calibration)


def summary(calibration: Calibration) -> str:
    """Return a line: how many estimates there are and how many of them moved."""
    rows = [row for row in calibration.rows if row.new]
    moved = [row for row in calibration.rows if row.moved]
    kinds = sorted({row.machine for row in calibration.rows})
    return f"{len(rows)} estimates for {', '.join(kinds)}; {len(moved)} moved"


def _terminal(calibration: Calibration) -> str:
    parts = []
    for machine, rows in _by_machine(calibration):
        parts.append(f"{machine}\n" + render_table(COLUMNS, [_cells(row) for row in rows]))
        parts += [f"{line}\n" for line in _model_lines(calibration.fits.get(machine), rows)]
    changes = [f"  {row.machine} {row.class_name}: {_why(row)}\n" for row in calibration.rows if row.moved]
    if changes:
        parts.append("Why:\n" + "".join(changes))
    return "\n".join([*parts, summary(calibration) + "\n"])


def _markdown(calibration: Calibration, policy: Policy) -> str:
    low, high = (f"{100 * part:.0f}th" for part in (policy.est_percentile, policy.timeout_percentile))
    parts = [
        "# Estimated times of the test classes",
        f"As of {calibration.as_of.date()}, from `python -m ci.calibrate`. Seconds. `new` (`est_time`, to pack by) follows "
        f"the {low} percentile of the last {policy.window} passing readings and `time-out` the {high}; both move only past "
        f"a threshold. `p50` and `p90` are what was measured; `drift` is how far the {low} percentile is from `old`. "
        "`launch` and `tests` are estimated apart.",
        f"**{summary(calibration)}.**",
    ]
    for machine, rows in _by_machine(calibration):
        align = ["left" if name in LEFT else "right" for name in COLUMNS]
        cells = [[_escape(cell) for cell in _cells(row)] for row in rows]
        table = tabulate(cells, headers=COLUMNS, tablefmt="github", disable_numparse=True, colalign=align)
        parts += [f"## {machine}", table, *_model_lines(calibration.fits.get(machine), rows)]
        changes = [f"- `{row.class_name}`: {_escape(_why(row))}" for row in rows if row.moved]
        if changes:
            parts += ["What moved, and why:", "\n".join(changes)]
    left = [
        f"- `{row.class_name}`: {_escape(text)}" for row in calibration.rows if not row.moved for text in row.findings
    ]
    if left:  # findings of the others are what this table settles
        parts += ["## To look into", "\n".join(left)]
    return "\n\n".join(parts) + "\n"


def _json(calibration: Calibration) -> str:
    content = {
        "as_of": calibration.as_of,
        "rows": [
            {
                "machine": row.machine,
                "class": row.class_name,
                "old": row.old,
                "new": row.new,
                "fresh": row.fresh,
                "drift": row.drift,
                "moved": row.moved,
                "findings": row.findings,
                "left_out": [
                    {"run": one.reading.run, "time": one.reading.time, "why": one.why} for one in row.chosen.left_out
                ],
            }
            for row in calibration.rows
        ],
        "fits": dict(calibration.fits),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def _by_machine(calibration: Calibration) -> list[tuple[str, list[Row]]]:
    """Return rows by machine kind; those that moved come first, the largest step leading, then all others by name."""
    found: dict[str, list[Row]] = {}
    for row in calibration.rows:
        found.setdefault(row.machine, []).append(row)
    return [
        (machine, sorted(rows, key=lambda row: (not row.moved, -_step(row), row.class_name)))
        for machine, rows in sorted(found.items())
    ]


def _step(row: Row) -> float:
    if not row.moved or not row.old or not row.new:
        return 0.0
    return abs(row.new.est_time - row.old.est_time)


def _cells(row: Row) -> list[str]:
    fresh, new = row.fresh, row.new
    return [
        row.class_name,
        _number(row.old.est_time if row.old else None),
        _number(new.est_time if new else None),
        str(fresh.readings) if fresh else "0",
        _number(fresh.p50 if fresh else None),
        _number(fresh.p90 if fresh else None),
        "-" if row.drift is None else percent(row.drift, signed=True),
        _number(new.launch if new else None),
        _number(new.tests if new else None),
        str(new.timeout) if new and new.timeout else "-",
        _state(row),
    ]


def _state(row: Row) -> str:
    if row.new is None:
        return "gone" if row.old else "no estimate"
    unread = row.fresh is None and row.new.state not in ("modelled", "declared")
    return f"{row.new.state}, no reading now" if unread else row.new.state


def _why(row: Row) -> str:
    if row.new is None:
        return f"no longer in the suite, last read {_last(row.old)}; its estimate is dropped"
    return row.new.why


def _last(one: Estimate | None) -> date | str:
    return (one.last if one else None) or "never"


def _model_lines(model: Fit | None, rows: Sequence[Row]) -> list[str]:
    predicted = [row for row in rows if row.new and row.new.state == "modelled"]
    if model is None or not predicted:
        return []
    return [
        f"{len(predicted)} never run: predicted by least squares over {', '.join(model.names)} on {model.classes} classes "
        f"with readings. Each of those, predicted from the others, is off by {percent(model.median_error)} in the median "
        f"and {percent(model.worst_error)} at worst; predictions are widened by {percent(model.upper - 1)} for it."
    ]


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{rounded(seconds):g}"


def _escape(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
