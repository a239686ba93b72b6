"""What one pytest process knows of its run: the options, the target, the launcher. Kept in the configuration's stash."""

from __future__ import annotations

import os
import subprocess
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conformance.run import Run
from conformance.targets.target import Target, load_target
from matrix.machine import machine_kind

if TYPE_CHECKING:
    from conformance.deployment import Launcher

#: The suite's own directory: what `pytest conformance` collects.
SUITE = Path(__file__).parent
SELFTEST = SUITE / "selftest"


class Suite:
    """The options of this run, and what is started once for it. Nothing is started before a test needs it."""

    def __init__(self, config: pytest.Config, run: Run, worker: str) -> None:
        self.config = config
        self.run = run
        self.worker = worker
        self.tier: str = config.getoption("wcc_tier")
        given = config.getoption("wcc_ledger")
        self.ledger = config.invocation_params.dir / given if given else config.rootpath / "reports/ledger/local.jsonl"
        self.keep_directory = False
        self._launcher: Launcher | None = None

    @cached_property
    def target(self) -> Target:
        """The target's description. Raises `BadTarget`."""
        return load_target(self.config.getoption("wcc_target"))

    @cached_property
    def device(self) -> str:
        """Where ranks run: `cpu` or `cuda`. `auto` is `cuda` where there is a GPU and the target declares `device:cuda`."""
        option: str = self.config.getoption("wcc_device")
        if option != "auto":
            return option
        return "cuda" if os.path.exists("/dev/nvidiactl") and "device:cuda" in self.target.features else "cpu"

    @cached_property
    def machine(self) -> str:
        """The kind of machine by which measurements are kept."""
        return machine_kind(_gpu_name() if self.device == "cuda" else None)

    @cached_property
    def version(self) -> str:
        """What the target says of its version; asked once a run."""
        return self.run.once("version", lambda: self.target.ask_version().encode()).decode()

    def launcher(self) -> Launcher:
        """Return what starts this process's daemons and engines."""
        if self._launcher is None:
            from conformance.deployment import Launcher

            self._launcher = Launcher(self.target, self.run, self.worker)
        return self._launcher

    def device_arguments(self) -> list[str]:
        """Return the launch arguments that choose the device."""
        return self.target.device_arguments(self.device)

    def command(self, nodeid: str) -> str:
        """Return the command line that runs one test of this run alone."""
        options = [("--target", self.config.getoption("wcc_target")), ("--device", self.device), ("--tier", self.tier)]
        return " ".join(["pytest", f"'{nodeid}'", *(f"{name} {value}" for name, value in options)])

    def close(self) -> None:
        """Stop what was started for the whole session."""
        if self._launcher is not None:
            self._launcher.close()


SUITE_KEY = pytest.StashKey[Suite]()


def suite_of(config: pytest.Config) -> Suite:
    """Return this process's suite."""
    return config.stash[SUITE_KEY]


def _gpu_name() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()[0].strip()
