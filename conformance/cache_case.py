"""What holds where the weights come from a daemon: modes `client` and `daemon`."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.case import Expected, WeightCacheCase, without_aliases
from conformance.check import Check
from conformance.checkpoints import Checkpoint
from conformance.deployment import DaemonRank, Engine, Unit, settles
from conformance.outputs import Output, difference, measure
from conformance.probe.memory import Footprint, footprint, mappings
from conformance.probe.wcp1 import Connection, Manifest, Slab
from conformance.requirement import requirement
from conformance.targets import Process
from conformance.targets.http import RankInfo
from matrix.digest import digest

#: Engines started and stopped, one after the other, to look for what they leave behind in a daemon.
RESTARTS = 10
#: The first of them make the daemon's allocator and thread stacks reach the size they keep.
WARM_UP = 2
#: Bytes that a daemon may grow by over the other restarts: room for an allocator's arenas, too little for a manifest each.
GROWTH_BYTES = 1 << 20


class CacheCase(WeightCacheCase):
    """Modes `client` and `daemon`: the weights come from a daemon."""

    @pytest.fixture(scope="class")
    @classmethod
    def daemon(cls, unit: Unit) -> Process | None:
        """The daemon, started once for the class; None in mode `daemon`, where the engine starts it."""
        return unit.start_daemon(cls.daemon_args) if cls.cell.mode == "client" else None

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, unit: Unit, daemon: Process | None) -> Engine:
        return unit.start_engine(cls.cell.mode, cls.server_args)

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls, unit: Unit, server: Engine) -> tuple[DaemonRank, ...]:
        """The daemon's ranks, while the engine under test is attached."""
        return unit.daemons()

    @requirement(
        "WC-LIFE-001",
        level="must",
        does="The moment a daemon says that it is ready, every socket of its registry is asked for its status.",
        expects="There is one for each rank, and each serves: state ready, all bytes loaded, a key and a layout hash.",
    )
    def test_ready_means_that_all_ranks_serve(self, check: Check, unit: Unit, server: Engine) -> None:
        check.equal("daemon ranks", self.layout.world_size, len(unit.at_ready))
        for rank in unit.at_ready:
            status = rank.status
            check.equal(f"state of {rank.place.device}", "ready", status.state)
            check.equal(f"bytes loaded by {rank.place.device}", status.total_bytes, status.loaded_bytes)
            check.equal(
                f"key and device of {rank.place.path}", (rank.place.key, rank.place.device), (status.key, status.device)
            )

    @requirement(
        "WC-SOURCE-002",
        level="must",
        does="The engine's word, the daemon's leases and the kernel's memory maps of the engine's ranks are compared.",
        expects="Source is the cache; one lease more a rank; the daemon's slab is mapped, whole and read-only, by that rank.",
    )
    def test_weights_came_from_the_cache(
        self, check: Check, unit: Unit, server: Engine, ranks: tuple[DaemonRank, ...]
    ) -> None:
        infos = server.client.server_info().ranks
        check.equal("sources", ["cache"] * self.layout.world_size, [info.source for info in infos])
        check.equal("transports", [self.cell.transport] * self.layout.world_size, [info.transport for info in infos])
        check.equal("daemons alive", [True] * self.layout.world_size, [info.daemon_alive for info in infos])
        before = {rank.place.path: rank.status.leases for rank in unit.at_ready} if self.cell.mode == "client" else {}
        for rank in ranks:
            grown = rank.status.leases - before.get(rank.place.path, 0)
            check.equal(f"leases that {rank.place.device} gave to the engine", 1, grown)
            self._check_mapping(check, self.engine_slab(server, rank), rank)

    def _check_mapping(self, check: Check, info: RankInfo, rank: DaemonRank) -> None:
        with Connection(rank.place.socket) as connection, connection.attach(rank.place.key) as slab:
            mapped = [mapping for mapping in mappings(info.pid) if mapping.identity == slab.identity]
            size = slab.reply.slab_size
        where = f"slab of {rank.place.device} in process {info.pid}"
        check.true(f"{where}: bytes mapped", sum(m.size for m in mapped) >= size, f"at least {size}", mapped)
        check.empty(f"{where}: writable mappings", [mapping for mapping in mapped if mapping.writable])

    @requirement(
        "WC-OUT-004",
        level="must",
        does="Several prompts run one after the other, on weights of the cache and on an engine that read the disk.",
        expects="Greedy tokens and the log-probabilities of all positions are equal to the bit.",
    )
    def test_outputs_equal_those_without_a_cache(
        self, check: Check, outputs: list[Output], baseline: list[Output]
    ) -> None:
        check.equal("first difference, off and cached", None, difference(baseline, outputs))

    @requirement(
        "WC-BYTES-003",
        level="must",
        does="Layout hash, fingerprint and key are read from the daemon's status, its manifest, and the engine.",
        expects="All say the same, and it is what the specification derives from the checkpoint; so are the digests.",
    )
    def test_daemon_announces_expected_bytes(
        self, check: Check, ranks: tuple[DaemonRank, ...], server: Engine, expected: Expected
    ) -> None:
        check.equal("daemon ranks", self.layout.world_size, len(ranks))
        for rank in ranks:
            info = self.engine_slab(server, rank)
            want = expected.ranks[info.tp_rank]
            with Connection(rank.place.socket) as connection:
                manifest = connection.manifest()
            device = rank.place.device
            for said, value in (("status", rank.status), ("manifest", manifest), ("engine", info)):
                check.equal(f"layout hash of {device}, {said}", want.layout_hash, value.layout_hash)
                check.equal(f"checkpoint of {device}, {said}", want.checkpoint, value.checkpoint)
                check.equal(f"key of {device}, {said}", rank.place.key, value.key)
            check.equal(f"digests in {device}'s manifest", dict(want.digests), announced(manifest))

    @requirement(
        "WC-BYTES-004",
        level="must",
        does="The slab is mapped by a third party, which digests each tensor's bytes itself.",
        expects="The digests are those that the specification derives from the checkpoint.",
    )
    def test_slab_holds_expected_bytes(
        self, check: Check, ranks: tuple[DaemonRank, ...], server: Engine, expected: Expected
    ) -> None:
        for rank in ranks:
            want = expected.ranks[self.engine_slab(server, rank).tp_rank]
            with Connection(rank.place.socket) as connection, connection.attach(rank.place.key) as slab:
                held = digests_of(slab)
            check.equal(f"digests of the slab of {rank.place.device}", without_aliases(want.digests), held)

    @requirement(
        "WC-SHARE-001",
        level="must",
        does="A second engine attaches to the daemon that serves the first, runs the same prompts, and is stopped.",
        expects="Both are served by one slab with equal outputs, and the first goes on as before when the second has gone.",
    )
    def test_two_engines_share_one_daemon(
        self,
        check: Check,
        unit: Unit,
        server: Engine,
        ranks: tuple[DaemonRank, ...],
        checkpoint: Checkpoint,
        outputs: list[Output],
    ) -> None:
        second = unit.start_engine("client", self.server_args)
        leases = [rank.ask().leases for rank in ranks]
        check.equal("leases with two engines", [rank.status.leases + 1 for rank in ranks], leases)
        for rank in ranks:
            self._check_mapping(check, self.engine_slab(second, rank), rank)
        there = measure(second.client, checkpoint.answers, checkpoint.vocab_size)
        check.equal("first difference of the two engines", None, difference(outputs, there))
        ending = unit.stop_process(second.process)
        check.true("ending of the second engine", ending.clean, "exit status 0", ending)
        self._check_leases_return(check, ranks)
        again = measure(server.client, checkpoint.answers, checkpoint.vocab_size)
        check.equal("first difference of the first engine, before and after", None, difference(outputs, again))

    def _check_leases_return(self, check: Check, ranks: tuple[DaemonRank, ...]) -> None:
        before = [rank.status.leases for rank in ranks]
        settles(lambda: [rank.ask().leases for rank in ranks] == before)
        check.equal("leases after the engine has gone", before, [rank.ask().leases for rank in ranks])

    @requirement(
        "WC-LEAK-001",
        level="must",
        does=f"An engine attaches, answers and stops {RESTARTS} times.",
        expects="Leases, descriptors, mappings, threads and processes come back to what they were; memory hardly grows.",
    )
    def test_restarts_leak_nothing(
        self, check: Check, unit: Unit, server: Engine, ranks: tuple[DaemonRank, ...], checkpoint: Checkpoint
    ) -> None:
        prompt = list(checkpoint.answers[1].input_ids)
        members = unit.members()
        before: list[Footprint] = []
        for number in range(RESTARTS):
            if number == WARM_UP:
                before = [footprint(rank.status.pid) for rank in ranks]
            engine = unit.start_engine("client", self.server_args)
            engine.client.generate(prompt, max_new_tokens=1)
            engine.client.close()
            ending = unit.stop_process(engine.process)
            check.true(f"ending of engine {number}", ending.clean, "exit status 0", ending)
            self._check_leases_return(check, ranks)
        check.empty("processes more than before", sorted(str(process) for process in unit.members() - members))
        for rank, first in zip(ranks, before, strict=True):
            settles(lambda rank=rank, first=first: not _more(first, footprint(rank.status.pid)))  # type: ignore[misc]
            last = footprint(rank.status.pid)
            check.empty(f"more than before in {rank.place.device}", _more(first, last))
            grown = last.anonymous_bytes - first.anonymous_bytes
            check.true(f"growth of {rank.place.device}", grown <= GROWTH_BYTES, f"at most {GROWTH_BYTES} bytes", grown)

    @classmethod
    def engine_slab(cls, engine: Engine, rank: DaemonRank) -> RankInfo:
        """Return the engine's rank that says it uses this daemon."""
        found = [info for info in engine.client.server_info().ranks if info.daemon_pid == rank.status.pid]
        if len(found) != 1:
            pytest.fail(f"{len(found)} of the engine's ranks name daemon {rank.status.pid} as theirs, one should")
        return found[0]


def announced(manifest: Manifest) -> dict[str, list[str]]:
    """Return the digests that a manifest gives, by tensor; none for an alias."""
    return {tensor.name: tensor.digests for tensor in manifest.tensors}


def digests_of(slab: Slab) -> dict[str, list[str]]:
    """Return the digests of a slab's bytes: one a tensor, or one a slot where the manifest has experts stacked."""
    found = {}
    for tensor in slab.manifest.tensors:
        if tensor.alias is None:
            parts = np.split(slab.tensor_bytes(tensor), max(1, len(tensor.digests)))
            found[tensor.name] = [digest(part) for part in parts]
    return found


def _more(first: Footprint, last: Footprint) -> list[str]:
    """Return what there is more of, each count on its own: one that fell must not hide another that grew."""
    counts = (
        ("descriptors", first.descriptors, last.descriptors),
        ("mappings of shared memory", first.memfd_mappings, last.memfd_mappings),
        ("threads", first.threads, last.threads),
    )
    return [f"{name}: {before}, then {after}" for name, before, after in counts if after > before]
