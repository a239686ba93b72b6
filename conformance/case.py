"""The base classes of generated test classes: one class is one cell, with one daemon and one engine started for it.

Which checks a cell has is decided by its bases (`classes.py`), not by skips: a check that doesn't apply isn't there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from conformance.check import Check
from conformance.checkpoints import Checkpoint, Recipe, ensure
from conformance.deployment import Engine, Unit
from conformance.outputs import TOLERANCES, Output, difference, distance, measure, pack, unpack
from conformance.requirement import requirement, requirement_of
from conformance.suite import Suite, suite_of
from matrix.cell import Cell, Layout
from matrix.digest import digests_digest
from matrix.oracle import RankExpectation, expected_ranks
from matrix.space import Model


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


def without_aliases(digests: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the digests of tensors that have bytes of their own."""
    return {name: values for name, values in digests.items() if values}
