"""The fork server: a command behaves as if it ran in its own process, and nobody is left behind when one end goes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import reference
from reference.engine.forkserver import ENVIRONMENT

ROOT = Path(reference.__file__).parents[1]
# What a command does is told by its environment, which the fork server passes on: `$DO` is run in the child.
FORKED = "import os, signal, sys\n\ndef main(argv):\n    return eval(os.environ['DO'])\n"
COMMAND = """
import sys
from reference.command_line import DAEMON
from reference.engine.forkserver import run_command
sys.exit(run_command(DAEMON, 'forked_command', sys.argv[1:]))
"""
SAY_AND_WAIT = "print(os.getpid(), flush=True) or signal.pause()"
# Says which signal came and ends with its number as status.
CATCH = (
    "[signal.signal(n, lambda n, _: (print(signal.Signals(n).name, flush=True), os._exit(n)))"
    " for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)] and " + SAY_AND_WAIT
)


class Server:
    """A fork server of its own process, without the reference's heavy imports where `light`."""

    def __init__(self, directory: Path, light: bool) -> None:
        self.socket = directory / "socket"
        (directory / "forked_command.py").write_text(FORKED)
        path = os.pathsep.join([str(directory), str(ROOT)])
        self.environment = {**os.environ, ENVIRONMENT: str(self.socket), "PYTHONPATH": path}
        code = "from reference.engine import forkserver; " + ("forkserver._PRELOAD = (); " if light else "")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code + f"raise SystemExit(forkserver.main(['--socket', {str(self.socket)!r}]))"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"ready: {self.socket}\n"

    def start(self, do: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
        """Start a command whose child evaluates `do`."""
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, "--model-path", str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            cwd=cwd,
            env={**self.environment, "DO": do, **environment},
        )

    def start_child(self, do: str) -> tuple[subprocess.Popen[str], int]:
        """Start a command that says its child's process id, and return both once it has."""
        command = self.start(do)
        assert command.stdout is not None
        return command, int(command.stdout.readline())

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait()


@contextmanager
def serving(light: bool = True) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="wcf-") as name:
        server = Server(Path(name), light)
        try:
            yield server
        finally:
            server.end()
            assert server.process.stdout is not None
            server.process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server
        assert server.children() == []
        descriptors = psutil.Process(server.process.pid).num_fds()
        assert server.start("0").wait() == 0
        assert psutil.Process(server.process.pid).num_fds() == descriptors


def await_end(pid: int) -> None:
    """Wait until a process that is not a child of this one is gone; the kernel says so."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(handle, "rb", closefd=True):
        select.select([handle], [], [])


@pytest.mark.parametrize("do", ["0", "3", "sys.exit(4)", "sys.exit()", "sys.exit('why')", "1 / 0", "os._exit(250)"])
def test_exit_status_is_the_childs(server: Server, do: str) -> None:
    expected = {"0": 0, "3": 3, "sys.exit(4)": 4, "sys.exit()": 0, "sys.exit('why')": 1, "1 / 0": 1}.get(do, 250)
    command = server.start(do)
    _, errors = command.communicate()
    assert command.returncode == expected
    assert ("ZeroDivisionError" in errors) == (do == "1 / 0")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT], ids=str)
def test_death_by_a_signal_is_the_commands_too(server: Server, number: signal.Signals) -> None:
    """So that a shell or a supervisor sees what happened; SIGKILL, whose handler can't be reset, included."""
    do = f"signal.signal({number:d}, signal.SIG_DFL) if {number:d} != 9 else 0; os.kill(os.getpid(), {number:d})"
    command = server.start(" or ".join(f"[{part.strip()}] and 0" for part in do.split(";")))
    _, errors = command.communicate()
    assert command.returncode == -number
    assert errors == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=str)
def test_signals_are_passed_on(server: Server, number: signal.Signals) -> None:
    command, pid = server.start_child(CATCH)
    command.send_signal(number)
    output, errors = command.communicate()
    assert (output, errors, command.returncode) == (f"{number.name}\n", "", number)
    await_end(pid)


def test_standard_streams_directory_environment_and_arguments_are_the_commands(server: Server, tmp_path: Path) -> None:
    do = "print(sys.stdin.read(), os.getcwd(), os.environ['WORD'], argv, sys.argv[1:]) or print('e', file=sys.stderr) or 0"
    command = server.start(do, tmp_path, WORD="\udcff é")
    output, errors = command.communicate("said")
    argv = ["--model-path", str(ROOT)]
    assert (command.returncode, errors) == (0, "e\n"), errors
    assert output == f"said {tmp_path} \udcff é {argv} {argv}\n"
    # The server itself is what it was.
    assert server.start(f"os.getcwd() != {str(ROOT)!r} or 'WORD' in os.environ").wait() == 0


def test_child_of_a_killed_command_is_told_to_stop(server: Server) -> None:
    command, pid = server.start_child(SAY_AND_WAIT)
    assert pid in server.children()
    command.kill()
    command.communicate()
    await_end(pid)


def test_command_and_child_that_end_at_once_leave_the_server_whole(server: Server) -> None:
    """The child's end and the command's come together, in either order, over and over."""
    for _ in range(10):
        command, pid = server.start_child(SAY_AND_WAIT)
        stopped = psutil.Process(server.process.pid)
        stopped.suspend()
        os.kill(pid, signal.SIGKILL)
        command.kill()
        command.communicate()
        stopped.resume()
        await_end(pid)
    assert server.start("7").wait() == 7


def test_commands_that_say_nothing_or_garbage_delay_nobody(server: Server) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(server.socket))
        for data, descriptors in ((b"{", [0, 1, 2]), (b"{}", [0]), (b"\xff", [])):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as garbled:
                garbled.connect(str(server.socket))
                socket.send_fds(garbled, [data], descriptors)
                assert garbled.recv(10) == b""
        assert server.start("5").wait() == 5


def test_child_holds_nothing_of_the_servers(server: Server) -> None:
    """A child that kept the listening socket, a sibling's or the server's own would keep them alive."""
    other, _ = server.start_child(SAY_AND_WAIT)
    command, pid = server.start_child(SAY_AND_WAIT)
    held = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
    for each in (command, other):
        each.terminate()
        each.communicate()
    assert len(held) == 3
    assert all(target.startswith("pipe:") for target in held), held


def test_end_of_the_server_ends_children_and_removes_its_socket() -> None:
    with serving() as server:
        command, pid = server.start_child(CATCH)
        assert server.end() == 0
        assert not server.socket.exists()
        output, _ = command.communicate()
        assert (output, command.returncode) == ("SIGTERM\n", signal.SIGTERM)
        await_end(pid)


def test_killed_server_takes_its_children_with_it() -> None:
    with serving() as server:
        command, pid = server.start_child(SAY_AND_WAIT)
        server.process.kill()
        await_end(pid)
        _, errors = command.communicate()
        assert command.returncode == 1
        assert errors == "error: the fork server ended while this command ran\n"


def run_server(path: Path) -> subprocess.CompletedProcess[str]:
    code = f"from reference.engine import forkserver; raise SystemExit(forkserver.main(['--socket', {str(path)!r}]))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_socket_path_that_is_taken(server: Server) -> None:
    done = run_server(server.socket)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: --socket: {server.socket}: Address already in use; give a path that is free\n"
    assert server.start("6").wait() == 6


def test_socket_path_that_can_not_be(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "absent" / "socket", "No such file"), (tmp_path / ("x" * 108), "too long")):
        done = run_server(path)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert word in done.stderr
        assert str(path) in done.stderr


def test_server_that_is_not_there(server: Server, tmp_path: Path) -> None:
    for path, word in ((tmp_path / "absent", "No such file"), (tmp_path / ("x" * 108), "too long")):
        command = server.start("0", **{ENVIRONMENT: str(path)})
        _, errors = command.communicate()
        assert command.returncode == 1
        assert len(errors.splitlines()) == 1
        assert all(said in errors for said in (f"{ENVIRONMENT}={path}", word, "start the fork server or unset it"))


def test_signal_during_the_imports_leaves_no_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="wcf-") as name:
        path, module = Path(name) / "socket", Path(name) / "preloaded.py"
        module.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
        code = f"forkserver._PRELOAD = ('preloaded',); raise SystemExit(forkserver.main(['--socket', {str(path)!r}]))"
        done = subprocess.run(
            [sys.executable, "-c", "from reference.engine import forkserver; " + code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([name, str(ROOT)])},
            timeout=60,
        )
        assert done.returncode == 0
        assert not path.exists()
