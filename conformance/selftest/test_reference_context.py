"""The published configuration: who may write it, what a reader gets when, and that one name never has two values."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reference import context
from reference.args import ServerArgs, declarations
from reference.context import (
    Context,
    ParallelContext,
    Ranks,
    get_cache,
    get_context,
    get_exec,
    get_model,
    get_parallel,
    get_server,
    get_server_args,
    install_group,
    override_server_args,
    publish,
)
from reference.errors import ArgumentRefusal
from reference.parallel import Group, initialize_groups

READERS: dict[str, Callable[[], Any]] = {
    "model": get_model,
    "parallel": get_parallel,
    "exec": get_exec,
    "cache": get_cache,
    "server": get_server,
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nothing is published yet."""
    monkeypatch.setattr(context, "_context", Context())
    return


def args(**fields: Any) -> ServerArgs:
    return ServerArgs(model_path="/models/m", **fields)


@pytest.fixture
def published() -> ServerArgs:
    given = args(tp_size=4, random_seed=7)
    publish(given, Ranks(2, 2))
    return given


def read(name: str) -> Any:
    """Read a leaf as readers do, by its namespace."""
    namespace, _, inner = declarations()[name].namespace.partition(".")
    bag = READERS[namespace]()
    return getattr(getattr(bag, inner) if inner else bag, name)


@pytest.mark.parametrize("name", ["tp_size", "ep_size", "model_path", "random_seed", "weight_cache_mode", "port"])
def test_read_before_publish(name: str) -> None:
    with pytest.raises((AttributeError, RuntimeError), match=r"config not published|before it exists"):
        read(name)
    with pytest.raises(AttributeError, match="config not published"):
        get_server_args()
    with pytest.raises(AttributeError, match="config not published"):
        get_context().override("too early", random_seed=1)
    assert get_context().overrides() == []


def test_every_argument_is_published_under_its_namespace(published: ServerArgs) -> None:
    initialize_groups()
    for name in declarations():
        assert read(name) == getattr(published, name), name
    assert get_server_args() is published


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_unknown_leaf(published: ServerArgs, reader: Callable[[], Any]) -> None:
    with pytest.raises(AttributeError, match=r"tp_sise: not a published .* config leaf"):
        _ = reader().tp_sise
    # What belongs to another namespace is not there either.
    other = "port" if reader is not get_server else "dtype"
    with pytest.raises(AttributeError, match=f"{other}: not a published"):
        getattr(reader(), other)
    assert not hasattr(reader(), "tp_sise")


def test_unknown_parallel_leaf_says_so_in_these_words(published: ServerArgs) -> None:
    with pytest.raises(AttributeError, match="not a published parallel config leaf"):
        _ = get_parallel().tp_sise


@pytest.mark.parametrize("reader", [*READERS.values(), lambda: object.__new__(ParallelContext)])
def test_private_names_are_never_leaves(published: ServerArgs, reader: Callable[[], Any]) -> None:
    """At once, and before construction too: copy and pickle ask a half-made object for such names."""
    for name in ("_nothing", "__setstate__x", "__deepcopy__"):
        with pytest.raises(AttributeError, match=name):
            getattr(reader(), name)


def test_copy_and_pickle_do_not_recurse(published: ServerArgs) -> None:
    for reader in READERS.values():
        assert type(copy.copy(reader())) is type(reader())
    assert pickle.loads(pickle.dumps(get_model())).model_path == "/models/m"
    assert pickle.loads(pickle.dumps(get_parallel())).ep_size == get_parallel().ep_size


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_readers_can_not_write(published: ServerArgs, reader: Callable[[], Any]) -> None:
    before = get_context().snapshot()
    for name in ("port", "dtype", "random_seed", "weight_cache_mode", "tp_size", "ep_size", "new"):
        with pytest.raises(AttributeError):
            setattr(reader(), name, 1)
    assert get_context().snapshot() == before


@pytest.mark.parametrize("name", ["tp", "pp", "dcp", "attn_cp", "moe_dp"])
def test_sizes_that_a_group_decides_are_not_guessed(published: ServerArgs, name: str) -> None:
    for leaf in (f"{name}_size", f"{name}_rank", f"{name}_group"):
        with pytest.raises(RuntimeError, match=f"{name} group: read before it exists"):
            getattr(get_parallel(), leaf)
    initialize_groups()
    group = getattr(get_parallel(), f"{name}_group")
    assert getattr(get_parallel(), f"{name}_size") == group.size == len(group.ranks)
    assert group.ranks[getattr(get_parallel(), f"{name}_rank")] == 2


def test_live_group_of_another_size_is_refused(published: ServerArgs) -> None:
    with pytest.raises(ArgumentRefusal, match="tp_size: published as 4, but the group that was made has 2 ranks"):
        install_group("tp", Group("tp", (0, 1), 0))
    with pytest.raises(RuntimeError, match="before it exists"):
        _ = get_parallel().tp_size
    install_group("tp", Group("tp", (0, 1, 2, 3), 2))
    assert (get_parallel().tp_size, get_parallel().tp_rank) == (4, 2)


def test_publish_again_starts_afresh(published: ServerArgs) -> None:
    initialize_groups()
    get_context().override("why", random_seed=8)
    publish(args(tp_size=2), Ranks(1, 1))
    assert get_context().overrides() == []
    with pytest.raises(RuntimeError, match="before it exists"):
        _ = get_parallel().tp_size
    initialize_groups()
    assert (get_parallel().tp_size, get_parallel().tp_rank, get_exec().random_seed) == (2, 1, 42)


@pytest.mark.parametrize(
    ("fields", "ranks", "words"),
    [
        ({"tp_size": 4, "ep_size": 3}, None, "--tp-size: 4"),
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True}, None, "--tp-size: 4"),
        ({"tp_size": 2}, Ranks(2, 0), "world of 2"),
        ({"tp_size": 2}, Ranks(-1, -1), "world of 2"),
    ],
    ids=["ep", "attention dp", "rank outside", "negative rank"],
)
def test_topology_that_does_not_multiply_out_publishes_nothing(
    published: ServerArgs, fields: dict[str, Any], ranks: Ranks | None, words: str
) -> None:
    before = get_context().snapshot()
    with pytest.raises(ArgumentRefusal, match=words) as caught:
        publish(args(**fields), ranks)
    assert len(str(caught.value).splitlines()) == 1
    assert get_context().snapshot() == before
    assert get_server_args() is published


def test_process_that_is_no_rank_has_none() -> None:
    publish(args(), None)
    for name in ("local_rank", "world_rank"):
        with pytest.raises(RuntimeError, match="not published for a rank"):
            getattr(get_parallel(), name)


def test_override_is_what_readers_see_and_is_recorded(published: ServerArgs) -> None:
    begun = time.time()
    get_context().override("port was taken", port=31000)
    get_context().override("seeds", random_seed=8, dtype="float32")
    assert (get_server().port, get_exec().random_seed, get_model().dtype) == (31000, 8, "float32")
    assert get_context().snapshot()["server"]["port"] == 31000
    found = [(entry["reason"], entry["name"], entry["old"], entry["new"]) for entry in get_context().overrides()]
    assert found == [
        ("port was taken", "port", 30000, 31000),
        ("seeds", "random_seed", 7, 8),
        ("seeds", "dtype", "auto", "float32"),
    ]
    times = [entry["time"] for entry in get_context().overrides()]
    assert begun <= times[0] <= times[1] <= times[2] <= time.time()
    # What was given at launch is not rewritten.
    assert get_context().arguments()["port"] == 30000


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prot": 1}, "prot: not a published config leaf"),
        ({"world_size": 8}, "world_size: not a published config leaf"),
        ({"_namespace": "x"}, "_namespace: not a published config leaf"),
        ({"tp_size": 2}, "tp_size: decided by the live group"),
        ({"moe_dp_size": 4}, "moe_dp_size: decided by the live group"),
        ({"ep_size": 3}, "--tp-size: 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_refused_override_changes_nothing(
    published: ServerArgs, wrong: dict[str, Any], words: str, first: bool
) -> None:
    """All or none: the good field beside the bad one stays as it was too, in either order, and nothing is recorded."""
    initialize_groups()
    before = get_context().snapshot()
    good = {"random_seed": 8}
    with pytest.raises((AttributeError, ArgumentRefusal), match=words):
        get_context().override("why", **(wrong | good if first else good | wrong))
    assert get_context().snapshot() == before
    assert get_context().overrides() == []
    assert (get_parallel().tp_size, get_exec().random_seed) == (4, 7)


def test_scoped_override_nests_and_restores_exactly(published: ServerArgs) -> None:
    initialize_groups()
    get_context().override("why", random_seed=8)
    before, record, reader = get_context().snapshot(), get_context().overrides(), get_parallel()

    def nest_and_fail() -> None:
        with override_server_args(ranks=Ranks(1, 1), tp_size=2):
            initialize_groups()
            assert (get_parallel().tp_size, get_parallel().tp_rank) == (2, 1)
            with override_server_args(ranks=Ranks(0, 0), port=1):
                get_context().override("inner", host="::1")
                assert (get_server().port, get_server().host) == (1, "::1")
            assert (get_server().port, get_server().host) == (30000, "127.0.0.1")
            assert get_parallel().tp_rank == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        nest_and_fail()
    assert (get_context().snapshot(), get_context().overrides()) == (before, record)
    assert get_parallel() is reader
    assert (get_parallel().tp_size, get_parallel().tp_rank, get_exec().random_seed) == (4, 2, 8)


def test_scoped_override_that_is_refused_changes_nothing(published: ServerArgs) -> None:
    before = get_context().snapshot()
    with pytest.raises(AttributeError, match="prot: not a published config leaf"), override_server_args(prot=1):
        pass
    with pytest.raises(ArgumentRefusal, match="--tp-size"), override_server_args(ep_size=3):
        pass
    assert get_context().snapshot() == before
    assert get_server_args() is published


def test_scoped_override_before_publish_leaves_nothing_published() -> None:
    with override_server_args(random_seed=3):
        assert get_exec().random_seed == 3
    with pytest.raises(AttributeError, match="config not published"):
        get_exec()
