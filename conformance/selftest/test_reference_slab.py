"""The slab: memory that is refused in time, sealed for good, and guarded by the kernel."""

from __future__ import annotations

import faulthandler
import os
import signal
from types import SimpleNamespace

import pytest

from reference.cache.transport import shm
from reference.errors import CacheRefusal


def test_a_slab_that_memory_can_not_hold_is_refused_before_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm.psutil, "virtual_memory", lambda: SimpleNamespace(available=4096))
    with pytest.raises(CacheRefusal, match="slab of 4,097 bytes: 4,096 bytes of memory are free") as refusal:
        shm.allocate(4097)
    assert refusal.value.code == "load_failed"
    slab = shm.allocate(4096)
    slab.close()


def test_a_write_through_the_sealed_slab_ends_the_writer_and_changes_nothing() -> None:
    slab = shm.allocate(4096)
    slab.writable().fill_(7)
    slab.seal()
    tensor = slab.tensor()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # its end is expected, and needs no report
        try:
            tensor.fill_(9)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    assert tensor.eq(7).all()
