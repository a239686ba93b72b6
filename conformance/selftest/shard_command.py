"""Runs `python -m ci.shard` within the process, with estimates of its own: fixtures for the self-tests of splits."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from ci import shard
from ci.class_times import CELLS_MODULE
from ci.est_time_file import write_est_times
from ci.estimate import Estimate
from matrix.generate import cells
from matrix.space import load_space

KIND = "nvidia-h200"
SMOKE = [cell.class_name for cell in cells(load_space(), "smoke")]
NODEIDS = [f"{CELLS_MODULE}::{name}" for name in SMOKE]


@pytest.fixture
def est_time(tmp_path: Path) -> Path:
    """Estimates of all but the last class of the smoke tier, on one machine kind."""
    path = tmp_path / "est_time.json"
    states = itertools.cycle(["measured", "modelled"])
    write_est_times(
        path,
        {
            KIND: {
                name: Estimate(est_time=10.0 + number, timeout=300, state=next(states), changed=date(2026, 12, 1))
                for number, name in enumerate(SMOKE[:-1])
            }
        },
    )
    return path


class Ran:
    """What a command gave back."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], est_time: Path) -> Run:
    def call(*arguments: object) -> Ran:
        given = [str(one) for one in arguments]
        if "--tier" in given and "--est-time" not in given:
            given += ["--est-time", str(est_time), "--machine", KIND]
        try:
            status = shard.main(given)
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return call


@pytest.fixture
def times(tmp_path: Path) -> Path:
    path = tmp_path / "times.txt"
    path.write_text("# a suite\ntests/test_a.py::TestA 30\ntests/test_b.py::TestB 20  # slow\n\nc 10\nd 5\n")
    return path


def nodeids_of(form: str, text: str) -> list[list[str]]:
    """Read the node ids of each shard back from what a format emits."""
    if form == "nodeids":
        return [shlex.split(line) for line in text.splitlines()]
    if form == "github":
        return [shlex.split(one["nodeids"]) for one in json.loads(text)["include"]]
    if form == "buildkite":
        commands = [step["command"].replace("$$", "$") for step in json.loads(text)["steps"]]
        return [_pytest_arguments(command) for command in commands]
    if form == "shell":
        return [_pytest_arguments(found) for found in re.findall(r"^  \d+\) exec (.*) ;;$", text, re.MULTILINE)]
    if form == "json":
        return [[one["nodeid"] for one in part["classes"]] for part in json.loads(text)["shards"]]
    raise AssertionError(form)


def _pytest_arguments(command: str) -> list[str]:
    python, dash_m, pytest_, *rest = shlex.split(command)
    assert (python, dash_m, pytest_) == ("python", "-m", "pytest")
    return rest[: rest.index("--tier")] if "--tier" in rest else rest
