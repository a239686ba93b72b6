"""Coverage, its reports and the `matrix` command, from a ledger to what is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from conformance.selftest.test_matrix_ledger import TIME, footer, header, record, write
from matrix.cell import Cell, Layout
from matrix.cli import main
from matrix.coverage import Coverage, cover
from matrix.generate import cells
from matrix.ledger import LedgerContents, Record, Run, now
from matrix.report import columns, markdown, terminal
from matrix.space import load_space

ROOT = Path(__file__).parents[2]
A, B = (Cell("m", Layout(tp), "client", "shm") for tp in (1, 2))


def contents(*records: Record) -> LedgerContents:
    return LedgerContents((Run("r1", header(), records, footer(records=len(records))),), ())


def coverage(*records: Record, now_after: float = 60) -> Coverage:
    return cover([A, B], contents(*records), TIME + timedelta(seconds=now_after))


def test_a_cell_never_run_says_so() -> None:
    assert [(row.cell, row.status, row.seconds) for row in coverage().rows] == [
        (A.id, "not run", None),
        (B.id, "not run", None),
    ]
    assert coverage().totals.statuses["not run"] == 2


@pytest.mark.parametrize(("earlier", "later"), [("passed", "failed"), ("failed", "passed"), ("passed", "skipped")])
@pytest.mark.parametrize("order", [1, -1])
def test_the_latest_result_counts_in_whatever_order_it_is_read(earlier: str, later: str, order: int) -> None:
    found = [record(A.id, outcome=earlier), record(A.id, outcome=later, time=TIME + timedelta(seconds=1))]
    assert coverage(*found[::order]).rows[0].status == later


def test_each_machine_kind_and_target_has_a_row_and_the_worst_is_the_cells() -> None:
    found = coverage(
        record(A.id), record(A.id, machine="nvidia-h200", outcome="failed", reason="why"), record(A.id, target="other")
    )
    assert [(row.machine, row.target, row.status) for row in found.rows[:-1]] == [
        ("cpu-2core", "other", "passed"),
        ("cpu-2core", "reference", "passed"),
        ("nvidia-h200", "reference", "failed"),
    ]
    assert found.totals.cells == 2
    assert {status: count for status, count in found.totals.statuses.items() if count} == {"failed": 1, "not run": 1}


def test_a_pass_with_a_failed_requirement_is_no_pass() -> None:
    row = coverage(record(A.id, requirements={"WC-A-001": "passed", "WC-A-002": "failed"})).rows[0]
    assert row.status == "failed"


def test_skipped_requirements_are_counted_apart() -> None:
    found = coverage(record(A.id, requirements={"WC-A-001": "passed", "WC-A-002": "skipped"}))
    assert found.totals.requirements == {"passed": 1, "skipped": 1}


def test_results_of_cells_that_are_gone_are_told() -> None:
    assert coverage(record("gone/tp1/off/private")).problems == (
        "the ledger has results of gone/tp1/off/private, which is no cell of the space",
    )
    assert cover([A], contents(record(B.id)), TIME, known=[A.id, B.id]).problems == ()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3600, "1 h"), (86399, "23 h"), (200000, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert columns.age(seconds) == text


def test_short_hashes_show_two_ranks_and_count_the_rest() -> None:
    assert columns.short_hashes([]) == "-"
    assert columns.short_hashes(["lh1:0123456789", "lh1:abcdefabcdef"]) == "01234 abcde"
    assert columns.short_hashes(["lh1:0123456789"] * 4) == "01234 01234 +2"


def test_markdown_escapes_bars_and_lists_reasons() -> None:
    text = markdown.render(coverage(record(A.id, outcome="failed", reason="a | b\nc", layout_hashes=["lh1:abcdef99"])))
    header_line, rule, first, *_ = text.splitlines()
    assert re.sub(" +", " ", header_line) == (
        "| model | layout | mode | transport | status | layout hash | sec/est | machine | age |"
    )
    assert set(rule) <= set("|:-")
    assert re.sub(" +", " ", first) == "| m | tp1 | client | shm | failed | abcde | 3.5 | cpu-2core | 1 min |"
    assert f"- {A.id} (failed, cpu-2core): a \\| b c" in text
    assert "2 cells: 0 passed, 1 not run, 1 failed" in text


def test_terminal_colours_only_on_request() -> None:
    found = coverage(record(A.id), record(B.id, outcome="failed"))
    assert "\x1b[" in terminal.render(found, colour=True)
    assert "\x1b[" not in terminal.render(found)


def test_markup_in_a_reason_is_shown_as_it_is() -> None:
    assert "[red]x[/red] [0]" in terminal.render(coverage(record(A.id, outcome="failed", reason="[red]x[/red] [0]")))


Run_ = Callable[..., tuple[int, str, str]]


@pytest.fixture
def matrix(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run_:
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> tuple[int, str, str]:
        status = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def default_ledger(tmp_path: Path) -> Path:
    """A ledger in the default place: one cell passed, one failed, and all others never ran."""
    failed = record("qwen3-tiny/tp2/daemon/shm", outcome="failed", reason="WC-X-001: expected 1, got 2")
    return write(tmp_path / "reports/ledger/local.jsonl", header(), record(), failed, footer(records=2))


def test_report_reads_the_default_ledger(matrix: Run_, default_ledger: Path) -> None:
    status, out, err = matrix("report", "--tier", "smoke")
    assert (status, err) == (0, "")
    assert len([line for line in out.splitlines() if line.strip().startswith("qwen3")]) == 12 + 1
    assert "12 cells: 1 passed, 10 not run, 1 failed" in out
    assert "qwen3-tiny/tp2/daemon/shm (failed, cpu-2core): WC-X-001: expected 1, got 2" in out
    assert "target: reference 0.1" in out


def test_report_as_json_has_every_row(matrix: Run_, default_ledger: Path) -> None:
    status, out, _ = matrix("report", "--format", "json")
    found = json.loads(out)
    assert status == 0
    assert [row["cell"] for row in found["rows"]] == [cell.id for cell in cells(load_space())]
    [passed] = [row for row in found["rows"] if row["status"] == "passed"]
    assert passed["layout_hashes"] == ["lh1:00"]
    assert found["totals"]["statuses"] == {"passed": 1, "skipped": 0, "not run": 22, "failed": 1, "error": 0}


def test_report_writes_a_file(matrix: Run_, default_ledger: Path, tmp_path: Path) -> None:
    _, shown, _ = matrix("report", "--format", "markdown")
    status, out, _ = matrix("report", "--format", "markdown", "--output", str(tmp_path / "COVERAGE.md"))
    assert (status, out) == (0, "")
    age = re.compile(r"\d+ (s|min|h|d) *\|")
    assert age.sub("", (tmp_path / "COVERAGE.md").read_text()) == age.sub("", shown)


@pytest.mark.parametrize("form", ["terminal", "markdown", "json"])
def test_report_never_hides_what_it_could_not_read(matrix: Run_, default_ledger: Path, form: str) -> None:
    default_ledger.write_bytes(default_ledger.read_bytes()[:-10])
    status, out, _ = matrix("report", "--format", form)
    assert status == 0
    assert "local.jsonl:4: lost line" in out
    assert "no footer: it was cut short" in out


def test_report_without_a_ledger_says_not_run(matrix: Run_) -> None:
    status, out, _ = matrix("report", "--tier", "smoke")
    assert status == 0
    assert "12 cells: 0 passed, 12 not run" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["report", "--ledger", "nix.jsonl"], "nix.jsonl: No such file"),
        (["report", "--ledger", "empty"], "empty: holds no *.jsonl"),
        (["report", "--ledger", "new.jsonl"], "new.jsonl:1: ledger format 9 is newer than 1"),
        (["report", "--tier", "huge"], "no tier 'huge' in the space; there are smoke, full"),
        (["report", "--output", "nowhere/x"], "nowhere/x: No such file"),
        (["list", "--tier", "huge"], "no tier 'huge'"),
        (["--space", "nix.toml", "list"], "nix.toml: No such file"),
        (["explain", "qwen3-tiny"], "'qwen3-tiny': not a cell id"),
        (["explain", "gpt/tp1/off/private"], "no model 'gpt' in the space; there are qwen3-tiny,"),
        (["explain", "qwen3-tiny/tp1/off/private", "--checkpoint", "nix"], "nix/config.json: No such file"),
    ],
)
def test_errors_are_one_line_and_exit_status_2(matrix: Run_, tmp_path: Path, argv: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new.jsonl").write_text('{"type":"record","format":9}\n')
    status, out, err = matrix(*argv)
    assert (status, out) == (2, "")
    assert err.startswith("matrix: ")
    assert message in err
    assert err.count("\n") == 1


def test_list_shows_every_cell_and_its_tiers(matrix: Run_) -> None:
    status, out, _ = matrix("list", "--format", "json")
    rows = json.loads(out)
    assert status == 0
    assert [row["id"] for row in rows] == [cell.id for cell in cells(load_space())]
    assert {row["id"] for row in rows if "smoke" in row["tiers"]} == {cell.id for cell in cells(load_space(), "smoke")}
    assert "24 cells" in matrix("list")[1]


def test_explain_gives_command_lines_and_node_id(matrix: Run_) -> None:
    status, out, _ = matrix("explain", "qwen3-moe-tiny/tp2/client/shm")
    assert status == 0
    assert 'python -m reference.daemon --model-path "$MODEL" --tp-size 2 --weight-cache-transport shm\n' in out
    assert (
        'python -m reference.engine --model-path "$MODEL" --tp-size 2 --weight-cache-mode client --weight-cache-transport shm'
        in out
    )
    assert "pytest conformance/test_cells.py::TestQwen3MoeTiny_TP2_Client --tier smoke" in out
    off = matrix("explain", "qwen3-tiny-untied/tp1/off/private")[1]
    assert "reference.daemon" not in off
    assert "--weight-cache-transport" not in off


def test_explain_says_which_rules_refuse(matrix: Run_) -> None:
    status, out, _ = matrix("explain", "qwen3-tiny/tp3/client/private")
    assert status == 1
    assert "legal      no" in out
    assert "refused by tp-query-heads: tp 3 does not divide 4 query heads" in out
    assert "refused by transport-mode" in out
    assert "reference" not in out


def test_the_command_reads_at_100_columns_and_imports_no_other_room(tmp_path: Path, default_ledger: Path) -> None:
    wide = record(
        "qwen3-moe-tiny-nonorm/tp2/daemon/shm",
        machine="nvidia-h200",
        layout_hashes=["lh1:" + "8" * 32] * 2,
        seconds={"launch": 9.0, "tests": 100.0, "teardown": 9.0, "whole": 123.4},
        time=now() - timedelta(minutes=23),
    )
    write(default_ledger, wide)
    script = (
        "import sys; from matrix.cli import main; main(['report']); "
        "print(*({'torch', 'reference', 'conformance', 'transformers'} & sys.modules.keys()), file=sys.stderr)"
    )
    environment = {**os.environ, "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    table = done.stdout.split("\n\n")[0].splitlines()
    assert len(table) == 2 + 24
    assert max(map(len, table)) <= 100
    row = "qwen3-moe-tiny-nonorm tp2 daemon shm passed 88888 88888 123.4 nvidia-h200 23 min"
    assert row in [" ".join(line.split()) for line in table]


def test_an_estimate_stands_beside_its_measurement(tmp_path: Path, default_ledger: Path) -> None:
    """Estimates of the same machine kind and class, and of no other."""
    write(
        default_ledger,
        record("qwen3-tiny/tp1/client/shm", seconds={"launch": 1.0, "tests": 2.0, "teardown": 0.5, "whole": 3.5}),
    )
    machine = record("qwen3-tiny/tp1/client/shm").machine
    file = tmp_path / "est.json"

    def shown(estimates: dict[str, dict[str, dict[str, float]]]) -> str:
        file.write_text(json.dumps({"format": 1, "machines": estimates}))
        command = [sys.executable, "-m", "matrix.cli", "report", "--est-time", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
        return next(line for line in done.stdout.splitlines() if "passed" in line)

    assert " 3.5/4.2 " in shown({machine: {"TestQwen3Tiny_TP1_Client": {"est_time": 4.2}}})
    assert " 3.5/140 " in shown({machine: {"TestQwen3Tiny_TP1_Client": {"est_time": 140}}})
    assert " 3.5 " in shown(
        {"another": {"TestQwen3Tiny_TP1_Client": {"est_time": 4.2}}, machine: {"TestOther": {"est_time": 1}}}
    )
