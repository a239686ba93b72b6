"""What a record says of the conditions it was measured under: load, warm caches, the attempt."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ci.readings import readings_of
from conformance.checkpoints import Recipe
from conformance.selftest.ci_samples import write_ledger
from conformance.selftest.test_plugin import MODULE, TARGET
from matrix.generate import cells
from matrix.ledger import Record, read
from matrix.machine import load_per_core
from matrix.space import load_space

pytest_plugins = ["pytester"]
SPACE = load_space()
SMOKE = cells(SPACE, "smoke")
#: The classes of `test_plugin`, which know their model as generated ones do; a test says that it is a later try.
WITH_MODEL = MODULE.replace('"cell": cell}', '"cell": cell, "model": load_space().model(cell.model)}').replace(
    "START", "pass"
)
RETRIED = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.cls.__name__.endswith("TP1_Off") and item.name == "test_second":
        item.execution_count = 2
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    (pytester.path / "mini.toml").write_text(TARGET)
    pytester.makepyfile(test_mini=WITH_MODEL.replace("FIRST", "True"))
    monkeypatch.setenv("WEIGHT_CACHE_CONFORMANCE_DIR", str(pytester.path / "cache"))
    for name in ("GITHUB_RUN_ATTEMPT", "BUILDKITE_RETRY_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def records(suite: pytest.Pytester) -> tuple[Record, ...]:
    suite.runpytest_subprocess("--target", "mini.toml", "--ledger", "ledger.jsonl").assert_outcomes(
        passed=2 * len(SMOKE), deselected=2 * (len(cells(SPACE)) - len(SMOKE))
    )
    return read([suite.path / "ledger.jsonl"]).records


def test_a_record_says_how_it_was_measured(suite: pytest.Pytester) -> None:
    warm = "qwen3-tiny"
    (suite.path / "cache" / Recipe.of(SPACE.model(warm)).key).mkdir(parents=True)
    suite.makeconftest(RETRIED)
    found = records(suite)
    assert {record.model: record.warm for record in found} == {warm: True, "qwen3-moe-tiny": False}
    assert all(record.load is not None and record.load >= 0 for record in found)
    assert {record.class_name for record in found if record.attempt == 2} == {
        cell.class_name for cell in SMOKE if cell.class_name.endswith("TP1_Off")
    }
    assert {record.attempt for record in found} == {1, 2}


@pytest.mark.parametrize(
    ("name", "value", "attempt"),
    [
        ("GITHUB_RUN_ATTEMPT", "1", 1),
        ("GITHUB_RUN_ATTEMPT", "3", 3),
        ("BUILDKITE_RETRY_COUNT", "0", 1),
        ("BUILDKITE_RETRY_COUNT", "2", 3),
        ("BUILDKITE_RETRY_COUNT", "", 1),
    ],
)
def test_a_retried_job_says_so(monkeypatch: pytest.MonkeyPatch, name: str, value: str, attempt: int) -> None:
    from conformance.recording import _attempt_of_run

    for each in ("GITHUB_RUN_ATTEMPT", "BUILDKITE_RETRY_COUNT"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert _attempt_of_run() == attempt


def test_old_ledgers_lack_the_fields_and_are_read(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "old.jsonl", [{SMOKE[0].class_name: 5.0}])
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    for name in ("load", "warm", "attempt"):
        del lines[1][name]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    contents = read([path])
    assert not contents.problems
    (found,) = readings_of(contents)
    assert (found.load, found.warm, found.attempt) == (None, None, 1)


def test_load_is_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 9.0, 9.0))
    monkeypatch.setattr("matrix.machine._cores", lambda: 2)
    assert load_per_core() == 1.5
