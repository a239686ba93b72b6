"""Each class runs on one worker, so that its daemon is started once."""

import pytest

from conformance.scheduler import LongestFirst, unit_of

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
