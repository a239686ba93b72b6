"""One run of the suite: its id, its directory, and what its processes compute once and share.

Under pytest-xdist the controller makes the run and hands it to the workers, so that all record under one id.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

#: A Unix socket's path holds 107 bytes; a registry below the run's directory needs about this many of them.
SOCKET_ROOM = 75
SOCKET_PATH = 107


@dataclass(frozen=True)
class Run:
    """A run: `id` names it in the ledger, `directory` is private to it and holds logs, registries and shared results.

    `arguments` is pytest's command line.
    """

    id: str
    directory: Path
    arguments: tuple[str, ...] = ()

    @classmethod
    def begin(cls, arguments: Sequence[str] = ()) -> Run:
        """Make a run with a fresh directory, in a place short enough for Unix sockets."""
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) + SOCKET_ROOM > SOCKET_PATH:
            base = Path("/tmp")
        directory = Path(tempfile.mkdtemp(prefix="wcc-", dir=base))
        return cls(secrets.token_hex(8), directory, tuple(map(str, arguments)))

    @classmethod
    def from_json(cls, text: str) -> Run:
        fields = json.loads(text)
        return cls(fields["id"], Path(fields["directory"]), tuple(fields["arguments"]))

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"directory": str(self.directory)})

    def once(self, name: str, compute: Callable[[], bytes]) -> bytes:
        """Return what the first caller of this run, in whatever process, computed under `name`.

        Others wait for it meanwhile. What `compute` raises reaches its caller, and the next one tries again.
        """
        shared = self.directory / "shared"
        shared.mkdir(exist_ok=True)
        place = shared / name
        with FileLock(shared / f"{name}.lock"):
            if not place.exists():
                draft = place.with_suffix(".draft")
                draft.write_bytes(compute())
                draft.rename(place)
        return place.read_bytes()

    def end(self, *, keep: bool) -> None:
        """Remove the directory, unless it is to be kept and has logs that someone may want to read."""
        if not (keep and any(self.directory.glob("*.log"))):
            shutil.rmtree(self.directory, ignore_errors=True)
