"""A server that has imported everything once and forks a process for each command.

`import torch` takes seconds; a fork of a process that has done it takes milliseconds. Started by
`python -m reference.engine.forkserver --socket PATH`; commands find it by `$WEIGHT_CACHE_FORK_SERVER`. A command's own
process stays in front: it passes signals on, its standard streams are the child's, and its exit status is the child's.
The server imports no GPU context and starts no thread, so that its children may do both.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from reference.command_line import Command, parse_args
from reference.errors import ArgumentRefusal

ENVIRONMENT = "WEIGHT_CACHE_FORK_SERVER"
_PRELOAD = (
    "torch",
    "torch.distributed",
    "uvicorn",
    "starlette.applications",
    "reference.cache.supervisor",
    "reference.engine.launcher",
)
_GRACE = 30.0  # seconds that children have to end when the server does; then they are killed
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run_command(command: Command, module: str, argv: Sequence[str]) -> int:
    """Run `module.main(argv)`: in a child of the fork server that `$WEIGHT_CACHE_FORK_SERVER` names, or else right here.

    The command line is checked before anything heavy is imported.
    """
    try:
        parse_args(argv, command)
    except ArgumentRefusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return int(importlib.import_module(module).main(list(argv)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            reason = error.strerror or error
            print(f"error: {ENVIRONMENT}={path}: {reason}; start the fork server or unset it", file=sys.stderr)
            return 1
        return _follow(sock, module, argv)


def _follow(sock: socket.socket, module: str, argv: Sequence[str]) -> int:
    # Blocked until the child exists, so that no signal is lost on the way to it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    request = {"module": module, "argv": list(argv), "cwd": os.getcwd(), "environ": dict(os.environ), "path": sys.path}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    try:
        socket.send_fds(sock, [json.dumps(request).encode()], [0, 1, 2])
    except OSError as error:
        print(f"error: {ENVIRONMENT}: the command can't be passed on ({error.strerror}); unset it", file=sys.stderr)
        return 1

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            sock.send(json.dumps({"signal": number}).encode())

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    try:
        reply = sock.recv(4096)
    except ConnectionError:
        reply = b""
    if not reply:
        print("error: the fork server ended while this command ran", file=sys.stderr)
        return 1
    status = json.loads(reply)["status"]
    if status < 0:
        # Ends as the child did, so that a shell or a supervisor sees the same signal.
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return int(status)


@dataclass
class _Child:
    pid: int
    pidfd: int
    command: socket.socket


@dataclass
class _Server:
    listener: socket.socket
    wakeup: tuple[socket.socket, socket.socket]
    selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    children: list[_Child] = field(default_factory=list)

    def run(self) -> None:
        """Serve until a signal comes, then end the children."""
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.wakeup[0], selectors.EVENT_READ, None)
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    self._end()
                    return
                key.data()

    def _end(self) -> None:
        for child in self.children:
            signal.pidfd_send_signal(child.pidfd, signal.SIGTERM)
        for child in list(self.children):
            with selectors.DefaultSelector() as selector:
                selector.register(child.pidfd, selectors.EVENT_READ)
                if not selector.select(_GRACE):
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            self._reap(child)

    def _accept(self) -> None:
        # What it asks for is read when it is there: a command that is stopped in between delays no other.
        command, _ = self.listener.accept()
        self.selector.register(command, selectors.EVENT_READ, lambda: self._start(command))

    def _start(self, command: socket.socket) -> None:
        self.selector.unregister(command)
        try:
            data, fds, _, _ = socket.recv_fds(command, 1 << 20, 3)
        except OSError:
            data, fds = b"", []
        try:
            request = json.loads(data)
        except ValueError:
            request = None
        if request is None or len(fds) != 3:
            for descriptor in fds:
                os.close(descriptor)
            command.close()
            return
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            command.close()
            self._become(request, fds, server)
        for descriptor in fds:
            os.close(descriptor)
        child = _Child(pid, os.pidfd_open(pid), command)
        self.children.append(child)
        self.selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._reap(child))
        self.selector.register(command, selectors.EVENT_READ, lambda: self._forward(child))

    def _forward(self, child: _Child) -> None:
        """Pass a signal on. A command that was killed can't send one: its child is told to stop."""
        if child not in self.children:
            return  # reaped by the event before this one
        try:
            data = child.command.recv(4096)
        except OSError:
            data = b""
        number = json.loads(data)["signal"] if data else signal.SIGTERM
        if not data:
            self.selector.unregister(child.command)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.pidfd, number)

    def _reap(self, child: _Child) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self.children.remove(child)
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(child.command)
        with contextlib.suppress(OSError):
            child.command.send(json.dumps({"status": status}).encode())
        child.command.close()

    def _become(self, request: dict[str, Any], fds: list[int], server: int) -> NoReturn:
        from reference.engine.ranks import (
            die_with_parent,
        )  # the commands' own processes import this module, but not that

        status = 1
        try:
            self.listener.close()
            self.selector.close()
            for end in self.wakeup:
                end.close()
            for other in self.children:
                other.command.close()
                os.close(other.pidfd)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            os.setsid()
            die_with_parent(signal.SIGTERM, server)
            for target, descriptor in enumerate(fds):
                os.dup2(descriptor, target)
                os.close(descriptor)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["environ"])
            sys.path[:] = request["path"]
            sys.argv[1:] = request["argv"]
            gc.unfreeze()
            status = int(importlib.import_module(request["module"]).main(request["argv"]))
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve forks until SIGTERM or SIGINT; children that still run then are told to stop."""
    parser = argparse.ArgumentParser(prog="python -m reference.engine.forkserver", description=__doc__.split("\n")[0])
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="import this module too")
    options = parser.parse_args(argv)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    # Before the socket exists, so that a signal never leaves it behind: one that comes during the imports ends `run`.
    signal.set_wakeup_fd(theirs.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(options.socket)
        except OSError as error:
            reason = error.strerror or error
            print(f"error: --socket: {options.socket}: {reason}; give a path that is free", file=sys.stderr)
            return 1
        try:
            os.chmod(options.socket, 0o600)
            listener.listen(128)
            for name in (*_PRELOAD, *options.preload):
                importlib.import_module(name)
            # Objects that were made so far are never looked at again by the collector, so children share their pages.
            gc.collect()
            gc.freeze()
            print(f"ready: {options.socket}", flush=True)
            _Server(listener, (ours, theirs)).run()
        finally:
            os.unlink(options.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
