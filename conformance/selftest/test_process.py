"""Starting and stopping programs: those that behave, and those that don't."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from conformance.targets import DidNotStart, Process

READY = "import sys; print('ready: 2 ranks', flush=True); "
WAIT = "import signal; signal.pause()"
CLEAN = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
SECONDS = 30


def start(tmp_path: Path, code: str) -> Process:
    return Process.start("thing", [sys.executable, "-c", code], ready=r"^ready: (?P<ranks>\d+)", log=tmp_path / "log")


def test_ready_line_is_an_event_and_the_rest_is_logged(tmp_path: Path) -> None:
    process = start(tmp_path, CLEAN + "print('loading'); print('worried', file=sys.stderr); " + READY + WAIT)
    assert process.wait_ready(SECONDS)["ranks"] == "2"
    ending = process.stop()
    assert ending.clean, ending
    assert process.stop() is ending
    logged = (tmp_path / "log").read_text()
    assert {"[thing] loading", "[thing] worried", "[thing] ready: 2 ranks"} <= set(logged.splitlines())


def test_early_exit_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys; sys.exit('error: --model-path: no such directory')")
    with pytest.raises(DidNotStart, match=r"(?s)exit status 1.*error: --model-path: no such directory"):
        process.wait_ready(SECONDS)


def test_missing_program_is_told(tmp_path: Path) -> None:
    process = Process.start("thing", ["no-such-program"], ready="ready", log=tmp_path / "log")
    with pytest.raises(DidNotStart, match="no-such-program: No such file"):
        process.wait_ready(SECONDS)


def test_silence_ends_at_the_limit(tmp_path: Path) -> None:
    process = start(tmp_path, CLEAN + "print('ready, not', flush=True); " + WAIT)
    with pytest.raises(DidNotStart, match=r"not ready within 0\.5 s"):
        process.wait_ready(0.5)
    assert not process.alive


def test_ready_on_stderr_does_not_count(tmp_path: Path) -> None:
    process = start(tmp_path, "import sys; print('ready: 2', file=sys.stderr)")
    with pytest.raises(DidNotStart, match="exit status 0"):
        process.wait_ready(SECONDS)


def test_stubborn_process_is_killed_and_said_so(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "\nwhile True: signal.pause()",
    )
    process.wait_ready(SECONDS)
    ending = process.stop(seconds=0.2)
    assert ending.killed
    assert not ending.clean
    assert ending.status == -signal.SIGKILL


def test_child_left_behind_is_found_and_killed(tmp_path: Path) -> None:
    child = f"import subprocess; child = subprocess.Popen([{sys.executable!r}, '-c', {WAIT!r}]); print('child', child.pid); "
    process = start(tmp_path, CLEAN + child + READY + WAIT)
    process.wait_ready(SECONDS)
    ending = process.stop()
    assert ending.status == 0
    assert not ending.clean
    pid = int((tmp_path / "log").read_text().split("child ")[1].split()[0])
    assert any(survivor.startswith(f"{pid} ") for survivor in ending.survivors)
    assert not psutil.pid_exists(pid)


def test_death_of_the_parent_stops_it(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    code = (
        "import sys, os, signal; from pathlib import Path; from conformance.targets import Process\n"
        f"argv = [sys.executable, '-c', {READY + WAIT!r}]\n"
        f"process = Process.start('thing', argv, ready='ready', log=Path({log!r}))\n"
        "process.wait_ready(30); print(process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=SECONDS, cwd=os.getcwd()
    )
    pid = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(SECONDS)


def test_environment_is_added(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import os; print('ready:', os.environ['ADDED'], 'PATH' in os.environ)"]
    process = Process.start("thing", argv, ready="^ready: (.*)", log=tmp_path / "log", environment={"ADDED": "yes"})
    assert process.wait_ready(SECONDS)[1] == "yes True"
    process.stop()
