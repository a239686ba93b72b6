"""The suite can fail: each mutant of the reference turns the right requirements red, and no others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from conformance.classes import make_class
from conformance.requirement import requirements_of
from conformance.selftest.mutants import MODULE, MUTANTS, Mutant
from conformance.suite import SUITE
from conformance.targets import Process, load_target
from matrix.cell import parse_cell_id
from matrix.ledger import Record, read
from matrix.space import load_space

#: The requirement that takes longest. Only mutants that are to turn it red run it.
SLOW = "WC-LEAK-001"
SECONDS = 240


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One fork server for all mutants: a mutation is applied after the fork."""
    command = load_target("reference").fork_server
    assert command is not None
    assert command.variable is not None
    directory = tmp_path_factory.mktemp("fork")
    socket = f"/tmp/wcc-mutants-{os.getpid()}"
    argv = [*command.argv(socket=socket), "--preload", MODULE]
    process = Process.start(
        "fork server", argv, ready=command.ready, log=directory / "log", environment={"OMP_NUM_THREADS": "1"}
    )
    process.wait_ready(SECONDS)
    yield {command.variable: socket}
    assert process.stop().clean


def write_target(name: str, path: Path) -> None:
    """Write a target that is the reference with a mutation, and that uses a fork server which is there already."""
    text = (SUITE / "targets/reference.toml").read_text()
    for part in ("daemon", "engine"):
        text, found = re.subn(rf'"reference\.{part}",', f'"{MODULE}", "{name}", "{part}",', text)
        assert found
    text = re.sub(r"(?s)\[fork_server\].*?(?=\n\[)", "", text)
    path.write_text(text.replace('name = "reference"', f'name = "mutant-{name}"'))


def measure(name: str, mutant: Mutant, tmp_path: Path, environment: dict[str, str]) -> Record:
    """Run the suite on a mutant's cell and return what it recorded."""
    write_target(name, tmp_path / "mutant.toml")
    cell = parse_cell_id(mutant.cell)
    command = [sys.executable, "-m", "pytest", f"{SUITE}/test_cells.py::{cell.class_name}", "--tier", "full", "-q"]
    command += [
        "--target",
        str(tmp_path / "mutant.toml"),
        "--ledger",
        str(tmp_path / "ledger.jsonl"),
        "-p",
        "no:cacheprovider",
    ]
    if SLOW not in mutant.red:
        command += ["-k", "not restarts"]
    # A run that fails keeps its logs, in the temporary directory. These runs are meant to fail.
    with tempfile.TemporaryDirectory(prefix="wcm-", dir="/tmp") as logs:
        done = subprocess.run(
            command,
            env=os.environ | environment | {"TMPDIR": logs},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
    contents = read([tmp_path / "ledger.jsonl"])
    assert not contents.problems, done.stdout
    (record,) = contents.records
    print(done.stdout)
    return record


class MutantCase:
    """One mutant. A class each, so that pytest-xdist's workers can share them out."""

    name: ClassVar[str]

    def test_right_requirements_turn_red(self, tmp_path: Path, fork_server: dict[str, str]) -> None:
        mutant = MUTANTS[self.name]
        record = measure(self.name, mutant, tmp_path, fork_server)
        red = {requirement for requirement, outcome in record.requirements.items() if outcome != "passed"}
        assert red == mutant.red, f"{mutant.does}\n{record.reason}"
        assert all(outcome in ("passed", "failed") for outcome in record.requirements.values())
        assert mutant.told in record.reason
        assert record.outcome == ("failed" if mutant.red else "skipped")


for _name in MUTANTS:
    _class = f"Test_{_name}"
    globals()[_class] = type(_class, (MutantCase,), {"name": _name, "__module__": __name__})


def test_every_requirement_has_a_mutant_that_it_catches() -> None:
    space = load_space()
    cells = {parse_cell_id(mutant.cell) for mutant in MUTANTS.values()}
    known = {name for cell in cells for name in requirements_of(make_class(cell, space, __name__))}
    caught = {name for mutant in MUTANTS.values() if mutant.told != "o_proj.weight" for name in mutant.red}
    assert known == caught
