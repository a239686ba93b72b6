"""The ledger: what is written is read again, and what is lost or cut is said."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from matrix.ledger import Footer, Header, Ledger, LedgerError, Line, Record, Seconds, now, read
from matrix.machine import git_revision, machine_kind

TIME = datetime(2026, 12, 1, 12, tzinfo=UTC)


def header(run: str = "r1") -> Header:
    return Header(
        run=run, time=TIME, revision="abc", machine="cpu-2core", device="cpu", target="reference", target_version="0.1"
    )


def record(cell: str = "qwen3-tiny/tp1/client/shm", run: str = "r1", **fields: object) -> Record:
    given = {
        "cell": cell,
        "class_name": "TestX",
        "outcome": "passed",
        "target": "reference",
        "target_version": "0.1",
        "requirements": {"WC-A-001": "passed"},
        "layout_hashes": ["lh1:00"],
        "digests_digest": ["dd1:00"],
        "seconds": Seconds(launch=1.0, tests=2.0, teardown=0.5, whole=3.5),
        "machine": "cpu-2core",
        "device": "cpu",
        "world_size": 1,
        "transport": "shm",
        "mode": "client",
        "model": "qwen3-tiny",
        "time": TIME,
        "revision": "abc",
        "run": run,
    }
    return msgspec.convert(given | fields, Record)


def footer(run: str = "r1", records: int = 1) -> Footer:
    return Footer(run=run, time=TIME, records=records, exit_status=0)


def write(path: Path, *lines: Line) -> Path:
    for line in lines:
        Ledger(path).append(line)
    return path


texts = st.text(max_size=20)
finite = st.floats(0, 1e6, allow_nan=False)
moments = st.datetimes(timezones=st.just(UTC))
records = st.builds(
    record,
    cell=texts,
    outcome=st.sampled_from(["passed", "failed", "skipped", "error"]),
    requirements=st.dictionaries(texts, texts, max_size=3),
    layout_hashes=st.lists(texts, max_size=3),
    seconds=st.builds(Seconds, finite, finite, finite, finite),
    time=moments,
    reason=texts,
)


@given(st.lists(records, max_size=4))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, some: list[Record]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "deep" / "local.jsonl"
    write(path, header(), *some, footer(records=len(some)))
    contents = read([path])
    assert contents.records == tuple(some)
    assert contents.problems == ()
    assert [(run.id, run.header, run.footer) for run in contents.runs] == [("r1", header(), footer(records=len(some)))]


def test_a_line_cut_anywhere_loses_only_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", header(), record("a"))
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last):
        path.write_bytes(whole[:-cut])
        contents = read([path])
        if cut == 1:  # the line's end alone is lost: the line is whole
            assert [one.cell for one in contents.records] == ["a"]
            continue
        assert contents.records == ()
        assert [problem.line for problem in contents.problems] == [2, 0], cut
        assert "l.jsonl:2: lost line: " in str(contents.problems[0])
        write(path, record("b"), footer(records=2))
        contents = read([path])
        assert [one.cell for one in contents.records] == ["b"], "a torn line spoils no line after it"
        assert [str(problem).partition(": ")[2] for problem in contents.problems[1:]] == [
            "run r1: its footer counts 2 records, 1 were read"
        ]


def test_a_run_without_footer_or_header_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", header("r1"), record("a", "r1"), record("b", "r2"), footer("r2"))
    assert [str(problem) for problem in read([path]).problems] == [
        f"{path}: run r1: no footer: it was cut short, or is still going on",
        f"{path}: run r2: no header: its first line is lost",
    ]


def test_a_newer_format_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", header())
    with path.open("a") as file:
        file.write('{"type":"record","format":2,"surprise":true}\n')
    message = f"{path}:2: ledger format 2 is newer than 1, the newest that this version reads"
    with pytest.raises(LedgerError, match=f"^{re.escape(message)}$"):
        read([path])


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"null",
        b"{}",
        b'{"type":"header","format":1}',
        b'{"type":"poem","format":1}',
        msgspec.json.encode(record()).replace(b"passed", b"praised", 1),
        msgspec.json.encode(record()).replace(b"12:00:00Z", b"12:00:00"),
        msgspec.json.encode(record()).replace(b'"world_size":1', b'"world_size":"1"'),
    ],
)
def test_a_line_that_makes_no_sense_is_reported(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "l.jsonl"
    path.write_bytes(line + b"\n")
    write(path, header(), record("a"), footer())
    contents = read([path])
    assert [problem.line for problem in contents.problems] == [1]
    assert [one.cell for one in contents.records] == ["a"]


def test_runs_of_several_files_stay_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{run}.jsonl", header(run), record("a", run), footer(run)) for run in ("r1", "r2")]
    assert [(run.id, len(run.records)) for run in read(paths).runs] == [("r1", 1), ("r2", 1)]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"nix\.jsonl: No such file"):
        read([tmp_path / "nix.jsonl"])


def _append_many(path: Path, run: str) -> None:
    for number in range(50):
        Ledger(path).append(record(f"{run}/{number}", reason="x" * 5000))


def test_lines_of_processes_that_write_at_once_stay_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", header())
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_append_many, args=(path, run)) for run in ("x", "y")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    write(path, footer(records=100))
    contents = read([path])
    assert contents.problems == ()
    assert sorted(one.cell for one in contents.records) == sorted(f"{run}/{n}" for run in "xy" for n in range(50))


def test_a_writer_waits_for_the_lock(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", header())
    before = path.read_bytes()
    writer = threading.Thread(target=write, args=(path, record()))
    with FileLock(f"{path}.lock"):
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert path.read_bytes() == before
    writer.join(60)
    assert len(read([path]).records) == 1


def test_now_is_in_utc() -> None:
    assert now().tzinfo is UTC
    assert abs((datetime.now(UTC) - now()).total_seconds()) < 5


def test_machine_kinds() -> None:
    assert machine_kind("NVIDIA H200") == "nvidia-h200"
    assert machine_kind("NVIDIA A100-SXM4 (80GB)") == "nvidia-a100-sxm4-80gb"
    assert re.fullmatch(r"cpu-[1-9]\d*core", machine_kind())


def test_git_revision_names_the_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    assert git_revision(tmp_path) == "unknown"
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "first", "--no-verify")
    clean = git("rev-parse", "--short=12", "HEAD")
    assert git_revision(tmp_path) == clean
    (tmp_path / "file").write_text("b")
    assert git_revision(tmp_path) == f"{clean}+"
    assert git_revision(tmp_path / "nowhere") == "unknown"
