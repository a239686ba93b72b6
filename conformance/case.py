"""The base classes of generated test classes: one class is one cell, with one daemon and one engine started for it.

Which checks a cell has is decided by its bases (`classes.py`), not by skips: a check that doesn't apply isn't there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from conformance.check import Check
from conformance.checkpoints import Checkpoint, Recipe, ensure
from conformance.deployment import DaemonRank, Engine, Unit, settles
from conformance.outputs import TOLERANCES, Output, difference, distance, measure, pack, unpack
from conformance.probe.memory import Footprint, footprint, mappings
from conformance.probe.wcp1 import Connection, Manifest, Slab
from conformance.requirement import requirement, requirement_of
from conformance.suite import Suite, suite_of
from conformance.targets import Process
from conformance.targets.http import RankInfo
from matrix.cell import Cell, Layout
from matrix.digest import digest, digests_digest
from matrix.oracle import RankExpectation, expected_ranks
from matrix.space import Model

#: Engines started and stopped, one after the other, to look for what they leave behind in a daemon.
RESTARTS = 10
#: The first of them make the daemon's allocator and thread stacks reach the size they keep.
WARM_UP = 2
#: Private bytes that a daemon may grow by over the other restarts: some pages of an allocator, far below a manifest each.
GROWTH_BYTES = 4 << 20


@dataclass(frozen=True)
class Expected:
    """What each rank must hold, derived on its own in `matrix/`."""

    ranks: Sequence[RankExpectation]


@dataclass
class Facts:
    """What a class learned about its cell, for the ledger: a layout hash and a digest of digests for each rank."""

    layout_hashes: list[str] = field(default_factory=list)
    digests_digest: list[str] = field(default_factory=list)


class WeightCacheCase:
    """What holds in every mode. Subclasses set `cell`, `model` and `layout`; extra arguments are added to command lines."""

    cell: ClassVar[Cell]
    model: ClassVar[Model]
    layout: ClassVar[Layout]
    daemon_args: ClassVar[tuple[str, ...]] = ()
    server_args: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[Facts]

    @pytest.fixture
    def check(self, request: pytest.FixtureRequest, unit: Unit) -> Check:
        """Comparisons that know which test they serve."""
        suite = suite_of(request.config)
        return Check(self.cell.id, requirement_of(request.function), suite.command(request.node.nodeid), str(unit.log))

    @pytest.fixture(scope="class")
    @classmethod
    def suite(cls, request: pytest.FixtureRequest) -> Suite:
        return suite_of(request.config)

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls) -> Checkpoint:
        return ensure(Recipe.of(cls.model))

    @pytest.fixture(scope="class")
    @classmethod
    def unit(cls, suite: Suite, checkpoint: Checkpoint) -> Iterator[Unit]:
        """The processes of this class; empty until another fixture starts some."""
        arguments = [*cls.layout.arguments(), *suite.device_arguments()]
        with suite.launcher().unit(cls.__name__, checkpoint.path, arguments, cls.cell.transport) as unit:
            yield unit

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, unit: Unit) -> Engine:
        """The engine under test, started once for the class."""
        return unit.start_engine(cls.cell.mode, cls.server_args)

    @pytest.fixture(scope="class")
    @classmethod
    def outputs(cls, server: Engine, checkpoint: Checkpoint) -> list[Output]:
        """What the engine under test computes for the checkpoint's prompts."""
        return measure(server.client, checkpoint.answers, checkpoint.vocab_size)

    @pytest.fixture(scope="class")
    @classmethod
    def baseline(cls, suite: Suite, checkpoint: Checkpoint) -> list[Output]:
        """What an engine without a cache computes at the same model and layout; measured once a run for all classes."""
        arguments = [*cls.layout.arguments(), *suite.device_arguments()]
        named = hashlib.blake2b(" ".join([*arguments, *cls.server_args]).encode(), digest_size=8).hexdigest()
        name = f"baseline-{checkpoint.recipe.key}-{named}"

        def compute() -> bytes:
            with suite.launcher().unit(name, checkpoint.path, arguments, None) as unit:
                engine = unit.start_engine("off", cls.server_args)
                return pack(measure(engine.client, checkpoint.answers, checkpoint.vocab_size))

        return unpack(suite.run.once(name, compute))

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, checkpoint: Checkpoint) -> Expected:
        """What the specification says that each rank holds."""
        return Expected(expected_ranks(checkpoint.path, cls.layout, dtype="auto"))

    @requirement(
        "WC-BYTES-001",
        level="must",
        does="The layout hash of each rank is derived from the checkpoint's header by the specification alone.",
        expects="The engine has the same ones, in rank order.",
    )
    def test_engine_has_expected_layout(self, check: Check, server: Engine, expected: Expected) -> None:
        ranks = server.client.server_info().ranks
        self.facts.layout_hashes[:] = [rank.layout_hash for rank in ranks]
        check.equal("ranks", list(range(self.layout.world_size)), [rank.tp_rank for rank in ranks])
        check.equal("layout hashes", [rank.layout_hash for rank in expected.ranks], self.facts.layout_hashes)

    @requirement(
        "WC-BYTES-002",
        level="must",
        does="The digests of each rank's tensors are derived from the checkpoint by the specification alone.",
        expects="The engine holds tensors with exactly these digests, and has taken them of its own mapping or slab.",
    )
    def test_engine_has_expected_bytes(self, check: Check, server: Engine, expected: Expected) -> None:
        ranks = server.client.server_info().ranks
        self.facts.digests_digest[:] = [digests_digest(rank.digests) for rank in ranks]
        state = "computed" if self.cell.mode == "off" else "verified"
        check.equal("digest states", [state] * self.layout.world_size, [rank.digest_state for rank in ranks])
        for want, got in zip(expected.ranks, ranks, strict=True):
            check.equal(f"digests, rank {got.tp_rank}", without_aliases(want.digests), without_aliases(got.digests))

    @requirement(
        "WC-OUT-001",
        level="must",
        does="Several prompts run one after the other, with log-probabilities of the full vocabulary at every position.",
        expects="They agree with what transformers computes in float32, within the tolerance of the checkpoint's dtype.",
    )
    def test_logprobs_agree_with_transformers(
        self, check: Check, checkpoint: Checkpoint, outputs: list[Output]
    ) -> None:
        bound = TOLERANCES[checkpoint.recipe.dtype]
        far = distance(checkpoint.answers, outputs, whole=False)
        within = far.largest <= bound.largest and far.mean <= bound.mean
        check.true("distance of log-probabilities", within, f"at most {bound}", far)

    @classmethod
    def engine_slab(cls, engine: Engine, rank: DaemonRank) -> RankInfo:
        """Return the engine's rank that says it uses this daemon."""
        found = [info for info in engine.client.server_info().ranks if info.daemon_pid == rank.status.pid]
        if len(found) != 1:
            pytest.fail(f"{len(found)} of the engine's ranks name daemon {rank.status.pid} as theirs, one should")
        return found[0]


class GreedyCase(WeightCacheCase):
    """For checkpoints in float32, where greedy decoding has one right answer."""

    @requirement(
        "WC-OUT-002",
        level="must",
        does="Prompts whose greedy continuation is decided by a margin are continued, from a float32 checkpoint.",
        expects="The tokens are those that transformers generates.",
    )
    def test_greedy_tokens_equal_transformers(
        self, check: Check, checkpoint: Checkpoint, outputs: list[Output]
    ) -> None:
        bound = TOLERANCES["float32"]
        check.equal(
            "greedy tokens",
            {f"prompt {index}": list(answer.output_ids) for index, answer in enumerate(checkpoint.answers)},
            {f"prompt {index}": list(output.output_ids) for index, output in enumerate(outputs)},
        )
        far = distance(checkpoint.answers, outputs, whole=True)
        check.true("distance along the continuation", far.largest <= bound.largest, f"at most {bound}", far)


class DiskCase(WeightCacheCase):
    """Mode `off`: no cache is used, and what is computed is what all others are compared with."""

    @requirement(
        "WC-SOURCE-001",
        level="must",
        does="An engine is started with its weight cache off.",
        expects="Every rank says that its weights came from the disk, and no daemon is there.",
    )
    def test_weights_came_from_disk(self, check: Check, unit: Unit, server: Engine) -> None:
        ranks = server.client.server_info().ranks
        check.equal("sources", ["disk"] * self.layout.world_size, [rank.source for rank in ranks])
        check.equal("daemons of ranks", [None] * self.layout.world_size, [rank.daemon_pid for rank in ranks])
        check.empty("daemons in the registry", unit.daemons())

    @requirement(
        "WC-OUT-003",
        level="must",
        does="The same prompts run on two engines without a cache, one started after the other.",
        expects="Tokens and log-probabilities are equal to the bit, so that they can serve as a baseline.",
    )
    def test_restart_changes_no_bit(self, check: Check, outputs: list[Output], baseline: list[Output]) -> None:
        check.equal("first difference of the two starts", None, difference(baseline, outputs))


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
        expects="Leases, descriptors, shared memory, threads and processes come back to what they were; memory hardly grows.",
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
            settles(lambda rank=rank, first=first: _countable(footprint(rank.status.pid)) <= _countable(first))  # type: ignore[misc]
            last = footprint(rank.status.pid)
            check.true(f"held by {rank.place.device}", _countable(last) <= _countable(first), first, last)
            grown = last.private_bytes - first.private_bytes
            check.true(f"growth of {rank.place.device}", grown <= GROWTH_BYTES, f"at most {GROWTH_BYTES} bytes", grown)


class EndsCleanly(WeightCacheCase):
    """The last check of every class: it stops all that the class has started."""

    @requirement(
        "WC-LIFE-002",
        level="must",
        does="All engines are asked to stop, then the daemon.",
        expects="Each exits with status 0 and leaves no process, socket, lock or shared memory behind.",
    )
    def test_nothing_is_left_after_the_end(self, check: Check, unit: Unit, server: Engine) -> None:
        endings = unit.stop()
        unclean = [f"{name}: {ending}" for name, ending in endings.items() if not ending.clean]
        check.empty("processes that did not end cleanly", unclean)
        check.empty("left behind", unit.remains())


def announced(manifest: Manifest) -> dict[str, list[str]]:
    """Return the digests that a manifest gives, by tensor; none for an alias."""
    return {tensor.name: tensor.digests for tensor in manifest.tensors}


def without_aliases(digests: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the digests of tensors that have bytes of their own."""
    return {name: values for name, values in digests.items() if values}


def digests_of(slab: Slab) -> dict[str, list[str]]:
    """Return the digests of a slab's bytes: one a tensor, or one a slot where the manifest has experts stacked."""
    found = {}
    for tensor in slab.manifest.tensors:
        if tensor.alias is None:
            parts = np.split(slab.tensor_bytes(tensor), max(1, len(tensor.digests)))
            found[tensor.name] = [digest(part) for part in parts]
    return found


def _countable(found: Footprint) -> tuple[int, int, int]:
    return found.descriptors, found.memfds, found.threads
