"""The reference with one thing made wrong, to see whether the suite sees it.

`python -m conformance.selftest.mutants NAME daemon|engine ARGUMENTS...` is the reference's daemon or engine with the
mutation NAME applied in its process, before any rank is forked. Each mutation is a mistake that a weight cache could make.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reference.command_line import DAEMON, ENGINE
from reference.engine.forkserver import run_command

MODULE = "conformance.selftest.mutants"
#: Tells the process that does the work, which the fork server may have forked, what to be: `NAME:daemon`, `NAME:engine`.
ENVIRONMENT = "WEIGHT_CACHE_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """A mutation. `cell` is what it is tried on; `red` are the requirements that have to fail, and no others."""

    does: str
    cell: str
    red: frozenset[str]
    apply: Callable[[str], None]
    told: str = ""


MUTANTS: dict[str, Mutant] = {}


def mutant(cell: str, *red: str, told: str = "") -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Register a mutation: a function of the part (`daemon` or `engine`) that it runs in. `told` is in the failure's text."""

    def register(apply: Callable[[str], None]) -> Callable[[str], None]:
        MUTANTS[apply.__name__] = Mutant((apply.__doc__ or "").split("\n")[0], cell, frozenset(red), apply, told)
        return apply

    return register


def main(argv: Sequence[str]) -> int:
    """Run a mutated daemon or engine until it is told to stop. Returns the exit status."""
    from reference.cache import supervisor
    from reference.engine import launcher

    name, part = os.environ[ENVIRONMENT].split(":")
    MUTANTS[name].apply(part)
    return {"daemon": supervisor.main, "engine": launcher.main}[part](argv)


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Put something around an attribute. Raises AttributeError where the reference has no such thing any more."""
    setattr(owner, name, wrap(getattr(owner, name)))


def _after_fill(change: Callable[[Any, Any], None]) -> None:
    """Have a daemon change its slab after it was filled, before it is sealed and digested. `change` gets slab and plan."""
    from reference.cache import daemon

    def wrap(fill: Callable[..., None]) -> Callable[..., None]:
        def filled(slab: Any, plan: Any, *rest: Any) -> None:
            fill(slab, plan, *rest)
            change(slab, plan)

        return filled

    _replace(daemon, "fill_slab", wrap)


CLIENT = "qwen3-moe-tiny/tp1/client/shm"
CLIENT_TP2 = "qwen3-moe-tiny/tp2/client/shm"
OFF = "qwen3-moe-tiny/tp1/off/private"
WRONG_OUTPUTS = ("WC-OUT-001", "WC-OUT-002", "WC-OUT-004")
WRONG_BYTES = ("WC-BYTES-002", "WC-BYTES-003", "WC-BYTES-004")


@mutant(CLIENT_TP2)
def nothing(part: str) -> None:
    """Change nothing: the suite is green."""


@mutant(CLIENT, *WRONG_BYTES, *WRONG_OUTPUTS)
def swapped_experts(part: str) -> None:
    """Load expert 0 into slot 1 and expert 1 into slot 0; digests are those of the bytes as they are."""
    from reference.weights.fill import slab_view

    def swap(slab: Any, plan: Any) -> None:
        for tensor in plan.tensors:
            if ".layers.0." in tensor.name and tensor.stacked:
                slots = slab_view(slab, tensor)
                slots[[0, 1]] = slots[[1, 0]]

    if part == "daemon":
        _after_fill(swap)


@mutant(CLIENT_TP2, *WRONG_BYTES, *WRONG_OUTPUTS)
def other_ranks_shard(part: str) -> None:
    """Fill rank 0's layers with the other rank's slices, under its own layout hash.

    Of rank 0 alone: were both exchanged, the sums over ranks would be equal, and so would be all outputs.
    """

    def other(source: Any) -> Any:
        if any(source.start):
            return source
        start = tuple(size - stop for size, stop in zip(source.of, source.stop, strict=True))
        stop = tuple(size - begin for size, begin in zip(source.of, source.start, strict=True))
        return dataclasses.replace(source, start=start, stop=stop)

    def wrap(fill: Callable[..., None]) -> Callable[..., None]:
        def filled(slab: Any, plan: Any, *rest: Any) -> None:
            tensors = tuple(
                dataclasses.replace(t, sources=tuple(map(other, t.sources))) if ".layers." in t.name else t
                for t in plan.tensors
            )
            fill(slab, dataclasses.replace(plan, tensors=tensors), *rest)

        return filled

    if part == "daemon":
        from reference.cache import daemon

        _replace(daemon, "fill_slab", wrap)


def _flip_a_bit(part: str) -> None:
    """Turn the sign of one weight over in the slab, with a manifest that was made of the slab as it was."""
    if part != "daemon":
        return
    from reference.cache import manifest

    def place(plan: Any) -> int:
        (tensor,) = (t for t in plan.tensors if t.name == "model.layers.1.self_attn.o_proj.weight")
        return int(tensor.offset) + 3

    def flip(slab: Any, plan: Any) -> None:
        slab[place(plan)] ^= 0x80

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(plan: Any, slab: Any, *rest: Any) -> Any:
            intact = slab.clone()
            flip(intact, plan)
            return make(plan, intact, *rest)

        return made

    _after_fill(flip)
    _replace(manifest, "make_manifest", wrap)


ALL_OF_A_CLIENT = (
    *(f"WC-BYTES-00{number}" for number in (1, 2, 3, 4)),
    *WRONG_OUTPUTS,
    *("WC-LIFE-001", "WC-LIFE-002", "WC-SOURCE-002", "WC-SHARE-001"),
)


@mutant(CLIENT, *ALL_OF_A_CLIENT, told="o_proj.weight")
def flipped_bit(part: str) -> None:
    """Flip one bit of a slab after its digests were taken: the engine refuses to start, and names the tensor."""
    _flip_a_bit(part)


@mutant(CLIENT, "WC-BYTES-004", *WRONG_OUTPUTS)
def flipped_bit_unseen(part: str) -> None:
    """Flip one bit of a slab after its digests were taken, and have the engine only say that it verified them."""
    _flip_a_bit(part)
    if part == "engine":
        from reference.cache import acquire

        _replace(acquire, "verify_slab", lambda verify: lambda *_: None)


def _lie_about_the_cache(keep_lease: bool) -> None:
    from reference.cache import acquire

    def wrap(honest: Callable[..., Any]) -> Callable[..., Any]:
        def lying(plan: Any, checkpoint: Any, device: str, rank: int) -> Any:
            cached = honest(plan, checkpoint, device, rank)
            if keep_lease:
                lease = cached.lease
            else:
                cached.lease.close()
                lease, _open_ends[rank] = socket.socketpair()
            cached.slab.close()
            own = acquire._from_disk(plan, checkpoint)
            return dataclasses.replace(cached, slab=own.slab, lease=lease)

        return lying

    _replace(acquire, "_from_daemon", wrap)


_open_ends: dict[int, socket.socket] = {}


@mutant(CLIENT, "WC-SOURCE-002", "WC-SHARE-001", told="leases")
def silent_disk(part: str) -> None:
    """Read the disk in silence, and claim that the weights came from the cache."""
    if part == "engine":
        _lie_about_the_cache(keep_lease=False)


@mutant(CLIENT, "WC-SOURCE-002", "WC-SHARE-001", told="bytes mapped")
def silent_disk_with_lease(part: str) -> None:
    """Read the disk in silence while holding a lease: only the kernel's memory maps show it."""
    if part == "engine":
        _lie_about_the_cache(keep_lease=True)


@mutant(CLIENT, "WC-OUT-001", "WC-OUT-002")
def dropped_norm(part: str) -> None:
    """Compute without the norm of queries, with a cache as without: every engine agrees, and all are wrong."""
    from reference.models import layers

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def dropped(self: Any, value: Any, *rest: Any) -> Any:
            return value if id(self) in skipped else forward(self, value, *rest)

        return dropped

    def mark(build: Callable[..., None]) -> Callable[..., None]:
        def built(self: Any, *arguments: Any, **named: Any) -> None:
            build(self, *arguments, **named)
            skipped.add(id(self.q_norm))

        return built

    skipped: set[int] = set()
    _replace(layers.RMSNorm, "forward", wrap)
    _replace(layers.Attention, "__init__", mark)


@mutant(CLIENT, "WC-BYTES-001", "WC-BYTES-003")
def own_layout_hash(part: str) -> None:
    """Derive the layout hash from more than the specification says, on both sides."""
    from reference.weights import plan

    _replace(plan, "FORMAT", lambda format: format + 1)


@mutant(CLIENT, "WC-LIFE-001", told="loading")
def early_ready(part: str) -> None:
    """Say ready before the ranks serve."""
    if part == "daemon":
        from reference.cache.daemon import DaemonRank

        def wrap(open_: Callable[[Any], None]) -> Callable[[Any], None]:
            def late(self: Any) -> None:
                threading.Timer(1.0, open_, (self,)).start()

            return late

        _replace(DaemonRank, "open", wrap)


@mutant(CLIENT, "WC-LIFE-002", told="left behind")
def litter(part: str) -> None:
    """End without removing anything from the registry."""
    if part == "daemon":
        from reference.cache.registry import Claim

        _replace(Claim, "release", lambda release: lambda self: None)


@mutant(CLIENT, "WC-LEAK-001", told="descriptors: ")
def leaked_descriptor(part: str) -> None:
    """Keep one descriptor more for each engine that ever attached."""
    if part == "daemon":
        from reference.cache.daemon import DaemonRank

        def wrap(grant: Callable[..., None]) -> Callable[..., None]:
            def granted(self: Any, *arguments: Any) -> None:
                grant(self, *arguments)
                os.dup(self._slab.descriptor)

            return granted

        _replace(DaemonRank, "_grant", wrap)


@mutant(CLIENT, "WC-LEAK-001", told="mappings of shared memory: ")
def leaked_mapping(part: str) -> None:
    """Map the slab once more for each engine that ever attached."""
    if part == "daemon":
        from reference.cache.daemon import DaemonRank

        library = ctypes.CDLL(None, use_errno=True)

        def wrap(grant: Callable[..., None]) -> Callable[..., None]:
            def granted(self: Any, *arguments: Any) -> None:
                grant(self, *arguments)
                address, size = ctypes.c_void_p(0), ctypes.c_size_t(self._slab.size)
                flags = (mmap.PROT_READ, mmap.MAP_PRIVATE, self._slab.descriptor)
                library.mmap(address, size, *flags, ctypes.c_long(0))

            return granted

        _replace(DaemonRank, "_grant", wrap)


@mutant(CLIENT, "WC-LEAK-001", told="growth")
def leaked_memory(part: str) -> None:
    """Keep a quarter of a megabyte for each engine that ever attached."""
    if part == "daemon":
        from reference.cache.daemon import DaemonRank

        kept = []

        def wrap(grant: Callable[..., None]) -> Callable[..., None]:
            def granted(self: Any, *arguments: Any) -> None:
                grant(self, *arguments)
                kept.append(b"\1" * (1 << 18))

            return granted

        _replace(DaemonRank, "_grant", wrap)


@mutant(CLIENT, "WC-SHARE-001")
def daemon_ends_with_first_to_leave(part: str) -> None:
    """Have an engine that ends take the daemon with it, though another engine is attached."""
    if part == "engine":
        from reference.engine import rank as ranks

        daemons: list[int] = []

        def watch(acquire: Callable[..., Any]) -> Callable[..., Any]:
            def acquired(*arguments: Any) -> Any:
                weights = acquire(*arguments)
                if weights.daemon_pid:
                    daemons.append(weights.daemon_pid)
                return weights

            return acquired

        def wrap(destroy: Callable[[], None]) -> Callable[[], None]:
            def destroyed() -> None:
                destroy()
                for pid in daemons:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)

            return destroyed

        _replace(ranks, "acquire_weights", watch)
        _replace(ranks, "destroy_groups", wrap)


@mutant(OFF, "WC-SOURCE-001", "WC-BYTES-002", told="sources")
def boastful_disk(part: str) -> None:
    """Claim the cache where there is none."""
    if part == "engine":
        from reference.cache import acquire

        def wrap(read: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments: dataclasses.replace(read(*arguments), source="cache", digest_state="verified")

        _replace(acquire, "_from_disk", wrap)


@mutant(OFF, "WC-OUT-003", "WC-BYTES-002")
def noise(part: str) -> None:
    """Load weights that differ in their last bits from start to start."""
    if part == "engine":
        from reference.cache import acquire

        def wrap(fill: Callable[..., None]) -> Callable[..., None]:
            def filled(slab: Any, plan: Any, *rest: Any) -> None:
                fill(slab, plan, *rest)
                for tensor in plan.tensors:
                    if tensor.name.endswith("o_proj.weight"):
                        for number, byte in enumerate(os.urandom(64)):
                            slab[tensor.offset + 4 * number] = byte

            return filled

        _replace(acquire, "fill_slab", wrap)


if __name__ == "__main__":
    os.environ[ENVIRONMENT] = ":".join(sys.argv[1:3])
    sys.exit(run_command({"daemon": DAEMON, "engine": ENGINE}[sys.argv[2]], MODULE, sys.argv[3:]))
