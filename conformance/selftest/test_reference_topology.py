"""Sizes that multiply out, ranks that act together: properties of the rank arithmetic, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.args import ServerArgs
from reference.context import (
    Ranks,
    get_context,
    get_exec,
    get_parallel,
    override_server_args,
    publish_ranks,
)
from reference.errors import ArgumentRefusal
from reference.parallel import initialize_groups, require_attn_tp_gather, require_mlp_sync, require_mlp_tp_gather
from reference.topology import GROUPS, Topology

POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any sizes that multiply out, the shadowed ones included."""
    attn_tp, attn_dp, attn_cp = draw(POWERS), draw(POWERS), draw(st.sampled_from([1, 2]))
    tp = attn_tp * attn_dp * attn_cp
    divisors = [n for n in range(1, tp + 1) if tp % n == 0]
    moe_ep = draw(st.sampled_from(divisors))
    moe_dp = draw(st.sampled_from([n for n in divisors if tp // moe_ep % n == 0]))
    return Topology(
        tp=tp,
        pp=draw(st.integers(1, 3)),
        dcp=draw(st.sampled_from(divisors)),
        attn_dp=attn_dp,
        attn_cp=attn_cp,
        moe_ep=moe_ep,
        moe_dp=moe_dp,
    )


@given(topologies())
def test_every_rank_is_in_exactly_one_group_of_each_kind(topology: Topology) -> None:
    for name in GROUPS:
        groups = topology.groups(name)
        members = [rank for group in groups for rank in group]
        assert sorted(members) == list(range(topology.world_size)), name
        assert {len(group) for group in groups} == {topology.size(name)}, name
        assert all(topology.group(name, rank) == group for group in groups for rank in group), name


@given(topologies())
def test_sizes_multiply_out(topology: Topology) -> None:
    assert topology.tp == topology.attn_tp * topology.attn_dp * topology.attn_cp
    assert topology.tp == topology.moe_ep * topology.moe_dp * topology.moe_tp
    assert topology.world_size == topology.tp * topology.pp


@given(topologies(), st.data())
def test_rank_formulas_are_sglangs(topology: Topology, data: st.DataObject) -> None:
    """The published formulas of SGLang's runtime context, against the position of a rank in its groups."""
    rank = data.draw(st.integers(0, topology.world_size - 1))
    t = rank % topology.tp
    expected = {
        "tp": t,
        "pp": rank // topology.tp,
        "attn_tp": t % topology.attn_tp,
        "attn_cp": t // topology.attn_tp % topology.attn_cp,
        "attn_dp": t // (topology.attn_tp * topology.attn_cp),
        "moe_tp": t % topology.moe_tp,
        "moe_ep": t % (topology.tp // topology.moe_dp) // topology.moe_tp,
        "moe_dp": t // (topology.tp // topology.moe_dp),
    }
    assert {name: topology.group(name, rank).index(rank) for name in expected} == expected


def test_ranks_are_read_from_the_live_groups() -> None:
    sizes: dict[str, Any] = {"tp_size": 8, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4}
    with override_server_args(**sizes, ranks=Ranks(5, 5)):
        initialize_groups()
        parallel = get_parallel()
        assert (parallel.attn_tp_rank, parallel.attn_dp_rank, parallel.attn_tp_size) == (1, 1, 4)
        assert (parallel.moe_ep_rank, parallel.moe_tp_rank, parallel.moe_tp_size) == (2, 1, 2)
        assert parallel.attn_tp_group.ranks == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp_size": 8, "ep_size": 3}, ["--tp-size: 8", "--ep-size (3)"]),
        ({"tp_size": 8, "dp_size": 3, "enable_dp_attention": True}, ["--tp-size: 8", "--dp-size (3"]),
        ({"tp_size": 6, "attn_cp_size": 4}, ["--tp-size: 6", "--attn-cp-size (4)"]),
        ({"tp_size": 6, "dcp_size": 4}, ["--tp-size: 6", "--dcp-size (4)"]),
        ({"tp_size": 8, "moe_dp_size": 2}, ["--moe-dp-size: 2", "--attn-cp-size 2"]),
        ({"tp_size": 2, "moe_dp_size": 2, "attn_cp_size": 2, "pp_size": 2}, ["--moe-dp-size: 2", "--pp-size 2"]),
        ({"tp_size": 8, "moe_dp_size": 2, "attn_cp_size": 2, "ep_size": 2}, ["--moe-dp-size: 2", "--tp-size 4"]),
        ({"tp_size": 8, "moe_dense_tp_size": 2}, ["--moe-dense-tp-size: 2", "(8)"]),
        ({"enable_dp_lm_head": True}, ["--enable-dp-lm-head", "--enable-dp-attention"]),
        ({"tp_size": 4, "nnodes": 3}, ["--nnodes: 3", "4 ranks"]),
        ({"tp_size": 4, "nnodes": 2, "node_rank": 2}, ["--node-rank: 2", "(2)"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_multiply_out_are_refused(sizes: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ArgumentRefusal) as refusal, override_server_args(**sizes):
        pass
    assert all(words in str(refusal.value) for words in said), refusal.value


@pytest.mark.parametrize("ranks", [Ranks(2, 0), Ranks(-1, 0), Ranks(0, 1)])
def test_ranks_outside_their_world_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ArgumentRefusal, match="outside a world of 2"), override_server_args(tp_size=2, ranks=ranks):
        pass


def test_an_override_that_does_not_multiply_out_changes_nothing() -> None:
    with override_server_args(tp_size=4, ep_size=2):
        before = get_context().snapshot()
        with pytest.raises(ArgumentRefusal, match="--ep-size"):
            get_context().override("elastic", ep_size=3, base_gpu_id=1)
        assert get_context().snapshot() == before
        get_context().override("elastic", ep_size=4)
        assert (get_parallel().ep_size, get_parallel().moe_tp_size) == (4, 1)


@pytest.mark.parametrize(
    ("published", "mlp_tp", "attn_tp", "sync"),
    [
        ({"tp_size": 4}, False, False, False),
        ({"tp_size": 4, "moe_dense_tp_size": 1}, False, True, True),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, True, False, True),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True, "moe_dense_tp_size": 1}, True, False, True),
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "moe_dense_tp_size": 1}, True, True, True),
    ],
    ids=str,
)
def test_gather_modes_read_what_was_published(
    published: dict[str, Any], mlp_tp: bool, attn_tp: bool, sync: bool
) -> None:
    with override_server_args(**published, ranks=Ranks()):
        initialize_groups()
        assert (require_mlp_tp_gather(), require_attn_tp_gather(), require_mlp_sync()) == (mlp_tp, attn_tp, sync)


def test_an_override_that_parts_from_the_live_groups_changes_nothing() -> None:
    """A derived size must not have two values: what was published, and what the groups that exist say."""
    with override_server_args(tp_size=4, ep_size=2, ranks=Ranks()):
        initialize_groups()
        before = get_context().snapshot()
        with pytest.raises(ArgumentRefusal, match="moe_tp_size: would become 1, but the live group has 2 ranks"):
            get_context().override("elastic", ep_size=4)
        assert get_context().snapshot() == before
        assert get_context().overrides() == []


def test_a_forked_rank_keeps_what_was_overridden_before() -> None:
    with override_server_args(tp_size=2):
        get_context().override("tune", page_size=4)
        publish_ranks(Ranks(1, 1))
        assert (get_exec().page_size, get_parallel().world_rank) == (4, 1)
        assert [entry["reason"] for entry in get_context().overrides()] == ["tune"]
        with pytest.raises(ArgumentRefusal, match="outside a world of 2"):
            publish_ranks(Ranks(2, 0))


def test_gather_modes_follow_an_override() -> None:
    with override_server_args(tp_size=4, ranks=Ranks()):
        initialize_groups()
        assert not require_mlp_sync()
        get_context().override("tune", moe_dense_tp_size=1)
        assert require_mlp_sync()


def test_arguments_alone_decide_no_more_than_publish() -> None:
    """Raw arguments are never checked for topology on their own: publishing is the one gate."""
    assert ServerArgs(model_path="", tp_size=8, ep_size=3).ep_size == 3
