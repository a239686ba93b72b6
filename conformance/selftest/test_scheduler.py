"""Each class runs on one worker, so that its daemon is started once."""

from pathlib import Path

import pytest

from conformance.scheduler import LongestFirst, unit_of
from matrix.est_time import read_est_times

pytest_plugins = ["pytester"]

CLASSES, TESTS = 6, 4
MODULE = f"""
import os
import pytest

class Base:
    @pytest.fixture(scope="class", autouse=True)
    def daemon(self, request):
        with open(os.environ["STARTS"], "a") as file:
            file.write(request.cls.__name__ + "\\n")

    @pytest.mark.parametrize("number", range({TESTS}))
    def test_something(self, number):
        pass

for number in range({CLASSES}):
    globals()[f"Test{{number}}"] = type(f"Test{{number}}", (Base,), {{}})
del Base

@pytest.mark.parametrize("text", ["a::b", "c"])
def test_alone(text):
    pass
"""


@pytest.mark.parametrize(
    "spread", [("-n0",), *(("-n2", "--dist", dist) for dist in ("load", "loadgroup", "worksteal"))], ids=" ".join
)
def test_starts_equal_classes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, spread: tuple[str, ...]
) -> None:
    starts = pytester.path / "starts"
    monkeypatch.setenv("STARTS", str(starts))
    pytester.makepyfile(MODULE)
    pytester.runpytest_subprocess(*spread).assert_outcomes(passed=CLASSES * TESTS + 2)
    assert sorted(starts.read_text().split()) == [f"Test{number}" for number in range(CLASSES)]


def test_dist_each_is_left_to_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_one(): pass")
    pytester.runpytest_subprocess("--dist", "each", "--tx", "2*popen").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("a/test_b.py::TestC::test_d", "a/test_b.py::TestC"),
        ("a/test_b.py::TestC::TestInner::test_d[x::y]", "a/test_b.py::TestC"),
        ("a/test_b.py::test_d", "a/test_b.py"),
        ("a/test_b.py::test_d[x::y]", "a/test_b.py"),
    ],
)
def test_unit_of(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == unit


def test_classes_come_before_modules_and_long_before_short() -> None:
    sizes = {"m.py": 9, "m.py::Short": 1, "m.py::Long": 3, "m.py::Other": 3}
    queue = LongestFirst({unit: {str(number): False for number in range(size)} for unit, size in sizes.items()})
    assert [queue.popitem(last=False)[0] for _ in sizes] == ["m.py::Long", "m.py::Other", "m.py::Short", "m.py"]
    assert not queue


def test_estimates_come_before_numbers_of_tests() -> None:
    units = {"m.py::Many": 9, "m.py::Slow": 1, "m.py::Quick": 2, "m.py::Unknown": 1, "m.py": 99}
    seconds = {"Slow": 100.0, "Many": 3.0, "Quick": 2.0, "m.py": 500.0}
    queue = LongestFirst(
        {unit: {str(number): False for number in range(size)} for unit, size in units.items()}, seconds
    )
    order = [queue.popitem(last=False)[0] for _ in units]
    assert order == ["m.py::Slow", "m.py::Unknown", "m.py::Many", "m.py::Quick", "m.py"]


ESTIMATES = '{"format": 1, "machines": {"cpu-9core": {"TestA": {"est_time": 2.5, "timeout": 60}}}}'


def test_estimates_are_read_by_machine(tmp_path: Path) -> None:
    path = tmp_path / "est_time.json"
    assert read_est_times(path) == {}
    path.write_text(ESTIMATES)
    assert read_est_times(path) == {"cpu-9core": {"TestA": 2.5}}


@pytest.mark.parametrize("text", ["", "[]", "{}", ESTIMATES.replace("1,", "2,", 1), ESTIMATES.replace("2.5", '"2.5"')])
def test_an_unreadable_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "est_time.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"est_time\.json: ") as caught:
        read_est_times(path)
    assert "\n" not in str(caught.value)


ORDERED = """
import os
import time
import pytest

class Base:
    def test_it(self):
        with open(os.environ["STARTS"], "a") as file:
            file.write(type(self).__name__ + "\\n")

for number in range(6):
    globals()[f"Test{number}"] = type(f"Test{number}", (Base,), {})
del Base
"""


def test_workers_start_with_the_longest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = pytester.path / "starts"
    monkeypatch.setenv("STARTS", str(starts))
    pytester.makepyfile(ORDERED)
    pytester.makeconftest(
        """
import conformance.plugin
conformance.plugin._est_times = lambda config: {f"Test{number}": 1.0 + number for number in range(6)}
"""
    )
    pytester.runpytest_subprocess("-n1").assert_outcomes(passed=6)
    assert starts.read_text().split() == [f"Test{number}" for number in reversed(range(6))]


@pytest.mark.parametrize("text", [ESTIMATES, "torn"])
def test_the_suite_reads_the_file_of_its_root(pytester: pytest.Pytester, text: str) -> None:
    """With `-n`, a torn file costs a warning and no test; a whole one costs nothing."""
    pytester.mkdir("ci")
    (pytester.path / "ci/est_time.json").write_text(text)
    pytester.makeini("[pytest]")
    cells = Path(__file__).parents[1] / "test_cells.py"
    result = pytester.runpytest_subprocess(
        "--rootdir", pytester.path, "-n1", "--device", "cpu", "-k", "no_such_test", cells
    )
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert ("classes go by their number of tests" in result.stdout.str() + result.stderr.str()) == (text == "torn")
