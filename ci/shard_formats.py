"""A split in the words of those who run it: pytest, GitHub Actions, Buildkite, a shell, and a reader."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tabulate import tabulate

from ci.shard_plan import Plan, Shard

SPLIT_FORMAT = 1
#: GitHub starts no more jobs than this of one matrix.
GITHUB_JOBS = 256


class FormatError(ValueError):
    """A split that a service can't take, or a file that holds none; the text is one line."""


def command(plan: Plan, shard: Shard) -> str:
    """Return the command line that runs a shard."""
    return shlex.join(["python", "-m", "pytest", *shard.nodeids, *plan.pytest_arguments])


def nodeids(plan: Plan) -> str:
    """One line a shard, its node ids apart by spaces and quoted for a shell."""
    return "\n".join(shlex.join(shard.nodeids) for shard in plan.shards)


def github(plan: Plan) -> str:
    """One line: a matrix for `strategy.matrix`, to be appended to `$GITHUB_OUTPUT` as `matrix=...`.

    `nodeids` is quoted for a shell. Raises `FormatError` for more jobs than a matrix may have.
    """
    if len(plan.shards) > GITHUB_JOBS:
        raise FormatError(f"{len(plan.shards)} shards: a GitHub Actions matrix has at most {GITHUB_JOBS} jobs")
    include = [
        {
            "name": f"{plan.machine} {shard.name}",
            "shard": f"{shard.number}-of-{shard.count}",  # fit for an artifact's name
            "runner": plan.labels[0] if len(plan.labels) == 1 else list(plan.labels),
            "nodeids": shlex.join(shard.nodeids),
            "seconds": round(shard.seconds, 1),
            "timeout-minutes": shard.timeout_minutes,
        }
        for shard in plan.shards
    ]
    return json.dumps({"include": include}, separators=(",", ":"))


def buildkite(plan: Plan) -> str:
    """A pipeline for `buildkite-agent pipeline upload`, as JSON, which it reads as well as YAML."""
    steps = [
        {
            "label": f"{plan.machine} {shard.name}",
            "key": f"conformance-{plan.machine}-{shard.number}",
            "command": command(plan, shard).replace("$", "$$"),  # the agent would expand it
            "agents": {"queue": ",".join(plan.labels)},
            "timeout_in_minutes": shard.timeout_minutes,
        }
        for shard in plan.shards
    ]
    return json.dumps({"steps": steps}, indent=2)


def shell(plan: Plan) -> str:
    """A POSIX script that runs the shard whose number it is given."""
    lines = [
        "#!/bin/sh",
        f"# {plan.machine}: {len(plan.shards)} shards; give this script the number of one.",
        'case "$1" in',
    ]
    lines += [f"  {shard.number}) exec {command(plan, shard)} ;;" for shard in plan.shards]
    lines += [f'  *) echo "$0: shard ${{1:-(none)}}: there are 1 to {len(plan.shards)}" >&2; exit 2 ;;', "esac"]
    return "\n".join(lines)


def as_json(plan: Plan) -> str:
    """Everything, and what `--previous` reads."""
    content: dict[str, Any] = {
        "format": SPLIT_FORMAT,
        "machine": plan.machine,
        "runners": len(plan.shards),
        "makespan": round(plan.makespan, 3),
        "lower_bound": round(plan.lower_bound, 3),
        "overhead": plan.overhead,
        "deadline": plan.deadline,
        "runners_at_least": plan.at_least,
        "moved": plan.moved,
        "shards": [
            {
                "number": shard.number,
                "seconds": round(shard.seconds, 3),
                "timeout_minutes": shard.timeout_minutes,
                "classes": [
                    {"name": one.name, "nodeid": one.nodeid, "seconds": one.seconds, "source": one.source}
                    for one in shard.classes
                ],
            }
            for shard in plan.shards
        ],
    }
    return json.dumps(content, indent=2)


def table(plan: Plan) -> str:
    """A table for a reader, with what is predicted, how far from the best it can be, and where the times come from."""
    rows = [
        (
            shard.name,
            len(shard.classes),
            f"{shard.seconds:.1f}",
            f"{shard.timeout_minutes} min",
            " ".join(one.name for one in shard.classes),
        )
        for shard in plan.shards
    ]
    sources = Counter(one.source for one in plan.classes)
    lines = [
        tabulate(
            rows,
            headers=["shard", "classes", "seconds", "time-out", "which"],
            disable_numparse=True,
            maxcolwidths=[None] * 4 + [90],
        ),
        "",
        summary(plan),
        "times: " + ", ".join(f"{count} {source}" for source, count in sorted(sources.items())),
        f"proof: {len(plan.classes)} classes, each in exactly one of {len(plan.shards)} shards",
    ]
    return "\n".join(lines)


def summary(plan: Plan) -> str:
    """One line: makespan, bound, runners."""
    gap = plan.makespan / plan.lower_bound - 1
    text = (
        f"{plan.machine}: {len(plan.shards)} runners, predicted makespan {plan.makespan:.1f} s; "
        f"no split is below {plan.lower_bound:.1f} s (at most {100 * gap:.1f} % to gain)"
    )
    if plan.deadline is not None:
        text += f"; a deadline of {plan.deadline:g} s needs at least {plan.at_least}"
    if plan.moved is not None:
        text += f"; {plan.moved} classes moved"
    return text


FORMATS: Mapping[str, Callable[[Plan], str]] = {
    "nodeids": nodeids,
    "github": github,
    "buildkite": buildkite,
    "shell": shell,
    "json": as_json,
    "table": table,
}


class _Class(msgspec.Struct):
    name: str


class _Shard(msgspec.Struct):
    classes: list[_Class]


class _Split(msgspec.Struct):
    format: int
    shards: list[_Shard]


def read_split(path: Path) -> dict[str, int]:
    """Return the runner of each class, from 0, of a split that was kept with `as_json`. Raises `FormatError` and OSError."""
    try:
        split = msgspec.json.decode(path.read_bytes(), type=_Split)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: no split: {error}") from error
    if split.format != SPLIT_FORMAT:
        raise FormatError(f"{path}: format is {split.format}; this version reads {SPLIT_FORMAT}")
    return {one.name: number for number, shard in enumerate(split.shards) for one in shard.classes}
