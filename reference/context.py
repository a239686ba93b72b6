"""The published configuration: what every reader in a process reads, and nothing else.

`publish` freezes one bag of values a namespace; `override` is the only other writer, and leaves a record. Readers call
`get_parallel()`, `get_exec()`, `get_cache()`, `get_model()`, `get_server()`. Sizes and ranks of groups that exist are
read live and shadow the configured values of the same name, so that a name can't have two values.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from reference.args import NAMESPACES, ServerArgs, declarations
from reference.errors import ArgumentRefusal
from reference.topology import GROUPS, Topology, make_topology

if TYPE_CHECKING:
    from reference.parallel import Group

# Sizes that only a live group answers for: before it exists, reading one fails loudly instead of guessing.
LIVE_SIZES = ("tp", "pp", "dcp", "attn_cp", "moe_dp")


@dataclass(frozen=True)
class Ranks:
    """Where a process stands, 0-based: among all ranks, and among those of its host."""

    world_rank: int = 0
    local_rank: int = 0


@dataclass(frozen=True)
class Override:
    """One permanent change of a published value: why, what, and when (Unix seconds)."""

    reason: str
    name: str
    old: Any
    new: Any
    time: float


class Bag:
    """The published values of one namespace, as plain attributes. Only this module writes to it."""

    def __init__(self, namespace: str, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)
        self.__dict__["_namespace"] = namespace

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self._namespace}.{name}: published values change only by get_context().override()")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{name}: not a published {self._namespace} config leaf")


def _live_size(name: str) -> Any:
    return property(lambda self: self._live(name).size, doc=f"Size of the live {name} group, in ranks.")


def _live_rank(name: str) -> Any:
    return property(lambda self: self._live(name).rank, doc=f"This process's rank in the live {name} group.")


def _live_group(name: str) -> Any:
    return property(lambda self: self._live(name), doc=f"The live {name} group.")


class ParallelContext:
    """Reader of the `parallel` namespace, with the live groups in front of the configured values.

    Sizes: `tp_size`, `pp_size`, `dcp_size`, `attn_cp_size`, `moe_dp_size` come from live groups alone; every other leaf
    (`ep_size`, `dp_size`, and the derived `attn_tp_size`, `moe_ep_size`, ...) is the published value. `<group>_rank` and
    `<group>_group` come from live groups, for each name in `topology.GROUPS`.
    """

    __slots__ = ("_groups", "_leaves", "_ranks")

    tp_size, pp_size, dcp_size, attn_cp_size, moe_dp_size = map(_live_size, LIVE_SIZES)
    tp_rank, pp_rank, dcp_rank = map(_live_rank, GROUPS[:3])
    attn_tp_rank, attn_cp_rank, attn_dp_rank = map(_live_rank, GROUPS[3:6])
    moe_tp_rank, moe_ep_rank, moe_dp_rank = map(_live_rank, GROUPS[6:])
    tp_group, pp_group, dcp_group = map(_live_group, GROUPS[:3])
    attn_tp_group, attn_cp_group, attn_dp_group = map(_live_group, GROUPS[3:6])
    moe_tp_group, moe_ep_group, moe_dp_group = map(_live_group, GROUPS[6:])

    def __init__(self, leaves: dict[str, Any] | None = None, ranks: Ranks | None = None) -> None:
        self._leaves = leaves
        self._ranks = ranks
        self._groups: dict[str, Group] = {}

    @property
    def world_rank(self) -> int:
        """This process's index among all ranks."""
        return self._published_ranks().world_rank

    @property
    def local_rank(self) -> int:
        """This process's index among the ranks of its host."""
        return self._published_ranks().local_rank

    def _published_ranks(self) -> Ranks:
        if self._ranks is None:
            raise RuntimeError("ranks: config not published for a rank; this process is none")
        return self._ranks

    def _live(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise RuntimeError(f"{name} group: read before it exists; call parallel.initialize_groups() first")
        return group

    def __getattr__(self, name: str) -> Any:
        # A private name is never a leaf; raising at once also keeps pickle and copy from recursing before __init__.
        if name.startswith("_"):
            raise AttributeError(name)
        leaves = self._leaves
        if leaves is None:
            raise AttributeError(f"{name}: config not published")
        if name not in leaves:
            raise AttributeError(f"{name}: not a published parallel config leaf")
        return leaves[name]


class Context:
    """All that is published in this process."""

    def __init__(self) -> None:
        self._args: ServerArgs | None = None
        self._bags: dict[str, Bag] = {}
        self._parallel = ParallelContext()
        self._overrides: list[Override] = []

    def override(self, reason: str, **fields: Any) -> None:
        """Change published values for good, all or none, and record it.

        Raises `AttributeError` for a name that is not a declared leaf or before anything is published, and
        `ArgumentRefusal` for a size that a live group decides or a topology that does not multiply out.
        """
        if not self._bags:
            raise AttributeError(f"override ({reason}): config not published")
        known = declarations()
        for name in fields:
            if name not in known:
                raise AttributeError(f"{name}: not a published config leaf (override: {reason})")
            if name.removesuffix("_size") in LIVE_SIZES:
                raise ArgumentRefusal(f"{name}: decided by the live group, can't be overridden (override: {reason})")
        parallel = dict(self._bags["parallel"].__dict__)
        parallel |= {name: value for name, value in fields.items() if known[name].namespace == "parallel"}
        topology = make_topology(parallel)
        for name, group in self._parallel._groups.items():
            if topology.size(name) != group.size:
                raise ArgumentRefusal(
                    f"{name}_size: would become {topology.size(name)}, but the live group has {group.size} ranks"
                    f" (override: {reason})"
                )
        for name, value in fields.items():
            leaves = self._bags[known[name].namespace].__dict__
            self._overrides.append(Override(reason, name, leaves[name], value, time.time()))
            leaves[name] = value
        self._bags["parallel"].__dict__.update(topology.derived())

    def topology(self) -> Topology:
        """Return the published sizes as a topology: what groups are made from. Readers use `get_parallel()`."""
        return make_topology(_bag("parallel").__dict__)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return every published value by namespace, for `/server_info` and a daemon's status."""
        return {
            namespace: {k: v for k, v in bag.__dict__.items() if k[0] != "_" and not isinstance(v, Bag)}
            for namespace, bag in self._bags.items()
        }

    def arguments(self) -> dict[str, Any]:
        """Return the launch arguments as given, for diagnostics."""
        return dataclasses.asdict(get_server_args())

    def overrides(self) -> list[dict[str, Any]]:
        """Return the record of permanent overrides, oldest first."""
        return [dataclasses.asdict(entry) for entry in self._overrides]


_context = Context()


def publish(args: ServerArgs, ranks: Ranks | None) -> None:
    """Freeze the configuration of this process, in place of what was published before. `ranks` is None for no rank.

    Raises `ArgumentRefusal`, with nothing changed, where sizes do not multiply out or ranks are outside of them.
    """
    bags = _make_bags(args)
    topology = make_topology(bags["parallel"].__dict__)
    if ranks is not None:
        _check_ranks(ranks, topology)
    bags["parallel"].__dict__.update(topology.derived())
    _context._args, _context._bags, _context._overrides = args, bags, []
    _context._parallel = ParallelContext(bags["parallel"].__dict__, ranks)


def publish_ranks(ranks: Ranks) -> None:
    """Become a rank of what was published before this process was forked, overrides included."""
    _check_ranks(ranks, _context.topology())
    _context._parallel = ParallelContext(_bag("parallel").__dict__, ranks)


def _check_ranks(ranks: Ranks, topology: Topology) -> None:
    if not 0 <= ranks.local_rank <= ranks.world_rank < topology.world_size:
        raise ArgumentRefusal(f"ranks: {ranks} lies outside a world of {topology.world_size}")


def _make_bags(args: ServerArgs) -> dict[str, Bag]:
    known = declarations()
    bags = {
        namespace: Bag(namespace, {n: getattr(args, n) for n, d in known.items() if d.namespace == namespace})
        for namespace in NAMESPACES
    }
    for namespace, bag in bags.items():
        owner, _, name = namespace.rpartition(".")
        if owner and name in bags[owner].__dict__:
            raise ValueError(f"{namespace}: a namespace and a leaf of {owner} have one name")
        if owner:
            bags[owner].__dict__[name] = bag
    return bags


def install_group(name: str, group: Group) -> None:
    """Let `group` answer for its size and rank from now on.

    Raises `ArgumentRefusal` where its size is not the published one: a name must not have two values.
    """
    published = _bag("parallel").__dict__[f"{name}_size"]
    if published != group.size:
        raise ArgumentRefusal(
            f"{name}_size: published as {published}, but the group that was made has {group.size} ranks"
        )
    _context._parallel._groups[name] = group


class override_server_args:  # noqa: N801 - read as a statement: `with override_server_args(tp_size=2):`
    """Publish other values for a while, for tests. Nests; leaves exactly what was there before, whatever happens within.

    `ranks` says which rank to be; groups have to be made within. Starts from the published arguments, or from defaults
    where nothing is published.
    """

    # A class and not a generator: a suspended generator that is collected would restore at some other time.
    def __init__(self, *, ranks: Ranks | None = None, **fields: Any) -> None:
        unknown = fields.keys() - declarations().keys()
        if unknown:
            raise AttributeError(f"{min(unknown)}: not a published config leaf")
        self._fields, self._ranks = fields, ranks
        self._saved: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        base = _context._args or ServerArgs(model_path="")
        saved = (_context._args, _context._bags, _context._parallel, _context._overrides)
        publish(dataclasses.replace(base, **self._fields), self._ranks)
        self._saved.append(saved)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _context._args, _context._bags, _context._parallel, _context._overrides = self._saved.pop()


def get_context() -> Context:
    """Return the process's context: overrides, the topology and the snapshot."""
    return _context


def get_parallel() -> ParallelContext:
    """Return the reader of parallel sizes, ranks and groups."""
    return _context._parallel


def get_model() -> Any:
    """Return the published `model` values."""
    return _bag("model")


def get_exec() -> Any:
    """Return the published `exec` values; `get_exec().moe` those about experts."""
    return _bag("exec")


def get_cache() -> Any:
    """Return the published `cache` values."""
    return _bag("cache")


def get_server() -> Any:
    """Return the published `server` values."""
    return _bag("server")


def get_server_args() -> ServerArgs:
    """Return the raw launch arguments. For diagnostics alone: readers of configuration use the namespaces."""
    if _context._args is None:
        raise AttributeError("server args: config not published")
    return _context._args


def _bag(namespace: str) -> Bag:
    bag = _context._bags.get(namespace)
    if bag is None:
        raise AttributeError(f"{namespace}: config not published")
    return bag
