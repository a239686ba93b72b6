"""SGLang's registration calls: read without running, one number changed and not a byte else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.registrations import RegistrationError, read_registrations, registrations_below, set_est_times

SOURCE = b'''"""register_cuda_ci(est_time=1) in a docstring is none."""
import unittest  # \xc3\xa4 est_time=100

from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci

register_cuda_ci(est_time=100, suite="stage-b-test-large-1-gpu")  # est_time=100, on three readings
register_amd_ci(
    # measured by hand
    suite="\xc3\xa4\xc3\xb6",  est_time = 62.5 ,
)
register_cpu_ci(5, "base-a-test-cpu"); register_cuda_ci(est_time=(1_000), stage="a", runner_config="8-gpu-h200", disabled="no")


class TestX(unittest.TestCase):
    register_cuda_ci(est_time=3, suite="inside a class: no registration")
'''


def test_registrations_are_read_as_sglang_reads_them() -> None:
    found = read_registrations(SOURCE, "test_x.py")
    assert [(one.backend, one.est_time, one.suite, one.disabled, one.line) for one in found] == [
        ("cuda", 100, "stage-b-test-large-1-gpu", None, 6),
        ("amd", 62.5, "\xe4\xf6", None, 7),
        ("cpu", 5, "base-a-test-cpu", None, 11),
        ("cuda", 1000, "a-test-8-gpu-h200", "no", 11),
    ]
    assert [SOURCE[one.start : one.end] for one in found] == [b"100", b"62.5", b"5", b"1_000"]


def test_that_number_alone_changes() -> None:
    cuda, amd, cpu, other = read_registrations(SOURCE, "test_x.py")
    expected = SOURCE.replace(b"est_time=100, suite", b"est_time=300, suite").replace(b"= 62.5 ,", b"= 70.25 ,")
    assert set_est_times(SOURCE, {cuda: 300, amd: 70.25}) == expected
    assert set_est_times(SOURCE, {other: 7, cpu: 12}) == SOURCE.replace(b"ci(5,", b"ci(12,").replace(b"1_000", b"7")
    assert set_est_times(SOURCE, {}) == SOURCE


filler = st.sampled_from(
    [b"", b"x = 1", b"# est_time=9", b'y = """\n\xf0\x9f\x98\x80 est_time=8"""', b"if x:\\\n    pass", b"\x0c"]
)
calls = st.sampled_from(
    [
        b"register_cuda_ci(est_time=%d, suite='\xc3\xa4')",
        b"register_cpu_ci(%d, 'a')",
        b"register_xpu_ci(\n  suite='b',\n  est_time=%d\n)",
    ]
)


@given(
    st.lists(st.tuples(filler, calls, st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=5),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.booleans(),
)
def test_any_source_is_changed_nowhere_else(
    parts: list[tuple[bytes, bytes, int, int]], line_end: bytes, mark: bytes, last_end: bool
) -> None:
    def source(place: int) -> bytes:
        lines = [
            line for part in parts for line in (part[0], part[1].replace(b"%d", str(part[place]).encode())) if line
        ]
        return mark + (b"\n".join(lines) + b"\n" * last_end).replace(b"\n", line_end)

    found = read_registrations(source(2), "a.py")
    assert [one.est_time for one in found] == [part[2] for part in parts]
    values = {one: part[3] for one, part in zip(found, parts, strict=True)}
    assert set_est_times(source(2), values) == source(3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"register_cuda_ci(*ARGS)", "a.py:1: register_cuda_ci: starred arguments; write est_time=SECONDS out"),
        (b"\nregister_cuda_ci(**ARGS)", "a.py:2: register_cuda_ci: starred arguments"),
        (b"register_cuda_ci(est_time=1, **ARGS)", "a.py:1: register_cuda_ci: starred arguments"),
        (b"register_amd_ci(suite='a')", "a.py:1: register_amd_ci: no est_time; write est_time=SECONDS"),
        (b"register_cuda_ci(est_time=SHORT, suite='a')", "a.py:1: register_cuda_ci: est_time is SHORT; a plain number"),
        (b"register_cuda_ci(est_time=2 * 60)", "a.py:1: register_cuda_ci: est_time is 2 * 60; a plain number"),
        (b"register_cuda_ci(est_time='100')", "a.py:1: register_cuda_ci: est_time is '100'; a plain number"),
        (b"register_cuda_ci(est_time=True)", "a.py:1: register_cuda_ci: est_time is True; a plain number"),
        (b"register_cuda_ci(est_time=-5)", "a.py:1: register_cuda_ci: est_time is -5; a plain number"),
        (b"register_cuda_ci(est_time=0)", "a.py:1: register_cuda_ci: est_time is 0; seconds above 0"),
        (b"register_cuda_ci(est_time=1e999)", "a.py:1: register_cuda_ci: est_time is inf; seconds above 0"),
        (b"register_cuda_ci(5, 'a', est_time=6)", "a.py:1: register_cuda_ci: est_time is given twice"),
        (
            b"register_cuda_ci(5, 'a', False, None, 1)",
            "a.py:1: register_cuda_ci: 5 positional arguments; 4 are allowed",
        ),
        (b"register_cuda_ci(est_time=5", "a.py:1: not Python: '(' was never closed"),
        (b"x = '\xe4'\nregister_cuda_ci(est_time=5)", "a.py: not UTF-8 at byte 5; convert it first"),
    ],
)
def test_what_can_not_be_rewritten_is_refused_in_one_line(source: bytes, message: str) -> None:
    with pytest.raises(RegistrationError, match=f"^{re.escape(message)}[^\n]*$"):
        read_registrations(source, "a.py")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True])
def test_no_number_is_written_that_could_not_be_read(value: float) -> None:
    (one,) = read_registrations(b"register_cuda_ci(est_time=5)", "a.py")
    with pytest.raises(ValueError, match="a number of seconds above 0 expected"):
        set_est_times(b"register_cuda_ci(est_time=5)", {one: value})


def test_a_registration_of_another_text_is_refused() -> None:
    (one,) = read_registrations(b"register_cuda_ci(est_time=5)", "a.py")
    with pytest.raises(RegistrationError, match=r"^a\.py:1: has changed since it was read; read it again$"):
        set_est_times(b"\nregister_cuda_ci(est_time=5)", {one: 7})


def test_a_directory_is_read_in_order_and_other_files_need_not_be_python(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "test_b.py").write_bytes(b"register_cuda_ci(est_time=5, suite='a')")
    (tmp_path / "test_a.py").write_bytes(b"register_cuda_ci(est_time=6, suite='a')")
    (tmp_path / "broken.py").write_bytes(b"print 'two'")
    assert [one.est_time for one in registrations_below(tmp_path)] == [5, 6]
    with pytest.raises(RegistrationError, match="nowhere: no such directory"):
        registrations_below(tmp_path / "nowhere")
