"""Which classes are to be split, and how long each is expected to take: from a tier of the matrix, or from a list."""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ci.estimate import Estimate
from ci.packing import Job
from matrix.generate import cells
from matrix.space import Space

#: The module that makes the classes of the matrix.
CELLS_MODULE = "conformance/test_cells.py"
#: Seconds of a class that nothing is known of, where nothing is known of any other either.
UNKNOWN_SECONDS = 60.0
#: A class that nobody gave a time-out is taken for hung after this many times its estimate, and no sooner than a minute.
_HUNG_FACTOR, _HUNG_AT_LEAST = 3.0, 60.0


class ClassListError(ValueError):
    """A list of classes, or a choice among them, that can't be used; the text is one line."""


@dataclass(frozen=True)
class ClassTime:
    """A class to be run. `nodeid` is what pytest takes; `name` the part after the module.

    `seconds`: what it is expected to take; `timeout`: seconds after which it is taken for hung. `source` says where
    `seconds` comes from: an estimate's state (`measured`, `shifted`, `few`, `modelled`, `declared`), `given` in the list,
    or `default`. `groups`: what it shares with others, by kind (`checkpoint:qwen3-tiny`).
    """

    name: str
    nodeid: str
    seconds: float
    timeout: float
    source: str
    groups: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        """The class as something to pack."""
        return Job(self.name, self.seconds, self.groups)


@dataclass(frozen=True)
class _Named:
    """A class before its seconds are known; None where the list doesn't tell."""

    name: str
    nodeid: str
    seconds: float | None
    groups: tuple[str, ...]


def tier_classes(
    space: Space,
    tier: str | None,
    ranks: Collection[int],
    only: Collection[str],
    estimates: Mapping[str, Estimate],
    default: float | None = None,
) -> list[ClassTime]:
    """Return the classes of a tier (None: of all), of the world sizes `ranks` and the names `only` where there are any.

    Classes of one model share its `checkpoint:` group; those that use daemons of one model, layout and transport share a
    `daemon:` group. Raises `ClassListError` for a name that isn't in the tier, KeyError for an unknown tier.
    """
    chosen = cells(space, tier)
    names = {cell.class_name for cell in chosen}
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "`matrix list` shows the classes"
            raise ClassListError(f"unknown class {name}: not in {f'tier {tier}' if tier else 'the matrix'}; {hint}")
    found = []
    for cell in chosen:
        if (ranks and cell.layout.world_size not in ranks) or (only and cell.class_name not in only):
            continue
        groups = [f"checkpoint:{cell.model}"]
        if cell.mode != "off":
            groups.append(f"daemon:{cell.model}/{cell.layout.short}/{cell.transport}")
        found.append(_Named(cell.class_name, f"{CELLS_MODULE}::{cell.class_name}", None, tuple(groups)))
    return _timed(found, estimates, default)


def listed_classes(
    lines: Iterable[str], where: str, estimates: Mapping[str, Estimate], default: float | None = None
) -> list[ClassTime]:
    """Return the classes of a list: each line a name or node id, then seconds, then groups (`kind:name`); `#` begins a comment.

    Seconds that are left out come from `estimates`. `where` names the list in errors. Raises `ClassListError`.
    """
    found: dict[str, _Named] = {}
    for number, line in enumerate(lines, 1):
        nodeid, *rest = line.split("#", 1)[0].split() or [""]
        if not nodeid:
            continue
        if nodeid in found:
            raise ClassListError(f"{where}:{number}: class {nodeid} is listed twice")
        seconds = _seconds(rest.pop(0), f"{where}:{number}: class {nodeid}") if rest and _is_number(rest[0]) else None
        for group in rest:
            if ":" not in group:
                raise ClassListError(
                    f"{where}:{number}: {group!r} is neither seconds nor a group (kind:name, as in checkpoint:llama)"
                )
        found[nodeid] = _Named(nodeid, nodeid, seconds, tuple(rest))
    return _timed(list(found.values()), estimates, default)


def group_savings(classes: Sequence[ClassTime], wanted: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Return the saving of each group in seconds, and notes on those that had to be cut.

    `wanted` names groups, or kinds of groups (`checkpoint`). A class that is shorter than what it would save bounds its
    groups' savings to half of its seconds between them. Raises `ClassListError` where no class has a group of that name.
    """
    groups = {group for one in classes for group in one.groups}
    for name in wanted:
        if not any(name in (group, group.split(":")[0]) for group in groups):
            raise ClassListError(
                f"saving of {name}: no class has such a group; there are {', '.join(sorted(groups)) or 'none'}"
            )
    found = {group: wanted.get(group, wanted.get(group.split(":")[0], 0.0)) for group in sorted(groups)}
    notes = []
    for one in classes:
        total = sum(found[group] for group in one.groups)
        if total >= one.seconds > 0:
            notes.append(
                f"{one.name} takes {one.seconds:g} s: what {', '.join(one.groups)} save is cut to half of that"
            )
            found |= {group: found[group] * one.seconds / total / 2 for group in one.groups}
    return found, notes


def _timed(named: Sequence[_Named], estimates: Mapping[str, Estimate], default: float | None) -> list[ClassTime]:
    """Give each class its seconds; one that nothing is known of gets `default`, else the median of the others."""
    known = [
        one.seconds or estimates[_class(one.name)].est_time
        for one in named
        if one.seconds or _class(one.name) in estimates
    ]
    fallback = default if default is not None else statistics.median(known) if known else UNKNOWN_SECONDS
    timed = []
    for one in named:
        estimate = estimates.get(_class(one.name))
        if one.seconds is not None:
            seconds, source = one.seconds, "given"
        elif estimate is not None:
            seconds, source = estimate.est_time, estimate.state
        else:
            seconds, source = fallback, "default"
        timeout = estimate.timeout if estimate and estimate.timeout else max(_HUNG_AT_LEAST, _HUNG_FACTOR * seconds)
        timed.append(ClassTime(one.name, one.nodeid, seconds, max(timeout, seconds), source, one.groups))
    return timed


def _class(name: str) -> str:
    """The class's own name, by which estimates are kept."""
    return name.rsplit("::", 1)[-1]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _seconds(text: str, what: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ClassListError(f"{what}: {text} s given; a class takes a positive number of seconds")
    return seconds
