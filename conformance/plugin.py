"""The suite's pytest plugin: options, markers, the scheduler for pytest-xdist, and the ledger.

It is loaded by every pytest of its environment, and does nothing visible unless tests of cells are collected.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.recording import Recorder, cell_of
from conformance.run import Run
from conformance.suite import SELFTEST, SUITE, SUITE_KEY, Suite, suite_of
from conformance.targets.target import BadTarget
from conformance.world_size import WORLD_SIZES
from matrix.est_time import read_est_times
from matrix.generate import cells
from matrix.space import load_space

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

_RECORDER = pytest.StashKey[Recorder]()
_WORKER_INPUT = "weight_cache_conformance"
#: Where estimates are kept, from pytest's root directory.
EST_TIMES = "ci/est_time.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weight-cache-conformance")
    group.addoption(
        "--target", dest="wcc_target", default="reference", metavar="NAME|FILE.toml", help="implementation under test"
    )
    group.addoption(
        "--device", dest="wcc_device", default="auto", choices=("auto", "cpu", "cuda"), help="where ranks run"
    )
    group.addoption("--tier", dest="wcc_tier", default="smoke", help="cells to run, by the tiers of matrix/space.toml")
    group.addoption(
        "--ledger",
        dest="wcc_ledger",
        default=None,
        metavar="FILE",
        help="where results are appended (default: reports/ledger/local.jsonl)",
    )


def pytest_configure(config: pytest.Config) -> None:
    for size in WORLD_SIZES:
        config.addinivalue_line("markers", f"{size}gpu: cells of {size} rank{'s' if size > 1 else ''}")
    given = getattr(config, "workerinput", None)
    run = Run.from_json(given[_WORKER_INPUT]) if given else Run.begin(config.invocation_params.args)
    config.stash[SUITE_KEY] = suite = Suite(config, run, given["workerid"] if given else "alone")
    config.stash[_RECORDER] = Recorder(suite)


def pytest_unconfigure(config: pytest.Config) -> None:
    suite = config.stash.get(SUITE_KEY, None)
    if suite is not None and not _is_worker(config):
        suite.run.end(keep=suite.keep_directory)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse options that make no sense, before pytest-xdist starts a worker."""
    if not _covers_cells(session.config):
        return
    suite = suite_of(session.config)
    try:
        _ = suite.target, load_space().tier(suite.tier)
    except BadTarget as error:
        raise pytest.UsageError(f"--target: {error}") from error
    except KeyError as error:
        raise pytest.UsageError(f"--tier: {error.args[0]}") from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not _covers_cells(config):
        return []
    suite = suite_of(config)
    return [
        f"target: {suite.target.name} {suite.version} ({suite.target.path}); device {suite.device} on {suite.machine}",
        f"tier: {suite.tier}; ledger: {suite.ledger} (run {suite.run.id})",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cells of the tier, and every test that belongs to no cell."""
    if not any(cell_of(item) for item in items):
        return
    tier = suite_of(config).tier
    try:
        chosen = set(cells(load_space(), tier))
    except KeyError as error:
        raise pytest.UsageError(f"--tier: {error.args[0]}") from error
    kept = [item for item in items if (cell := cell_of(item)) is None or cell in chosen]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    recorder = item.config.stash[_RECORDER]
    recorder.start(item)
    result = yield
    if cell_of(item) and getattr(nextitem, "cls", None) is not item.cls:  # type: ignore[attr-defined]
        recorder.finish()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.config.stash[_RECORDER].note(item, call, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
    result = yield
    suite, recorder = suite_of(session.config), session.config.stash[_RECORDER]
    recorder.finish()  # the class at which `-x` or an interrupt stopped
    suite.close()
    if not _is_worker(session.config):
        recorder.end(int(exitstatus))
        suite.keep_directory = bool(exitstatus)
    return result


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    suite, records = suite_of(config), config.stash[_RECORDER].records()
    if records:
        terminalreporter.write_line(
            f"{records} cell{'s' if records > 1 else ''} recorded in {suite.ledger} (run {suite.run.id})"
        )
        if exitstatus:
            terminalreporter.write_line(f"logs: {suite.run.directory}")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[_WORKER_INPUT] = suite_of(node.config).run.to_json()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Keep each class on one worker, whatever `--dist` says, except where every worker is to run everything.

    Classes of cells go longest first by their estimates, where there are any.
    """
    if config.getvalue("dist") == "each":
        return None
    from conformance.scheduler import UnitScheduling

    return UnitScheduling(config, log, _est_times(config))


def _est_times(config: pytest.Config) -> dict[str, float]:
    if not _covers_cells(config):
        return {}
    try:
        return read_est_times(config.rootpath / EST_TIMES).get(suite_of(config).machine, {})
    except ValueError as error:
        warnings.warn(pytest.PytestConfigWarning(f"classes go by their number of tests: {error}"), stacklevel=2)
        return {}


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _covers_cells(config: pytest.Config) -> bool:
    """Return whether the arguments of the command line lead to tests of cells."""
    for argument in config.args:
        path = Path(argument.split("::")[0]).resolve()
        inside = path.is_relative_to(SUITE) and not path.is_relative_to(SELFTEST)
        if inside or SUITE.is_relative_to(path):
            return True
    return False
