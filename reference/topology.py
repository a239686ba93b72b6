"""How ranks are laid out: sizes that must multiply out, and which ranks act together. Pure arithmetic, no process.

Within a pipeline stage of `tp` ranks the attention layout is (dp, cp, tp) and the expert layout (moe_dp, ep, moe_tp), the
last one fastest. Source: SGLang's `runtime_context` and `parallel_state`, whose names are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reference.errors import ArgumentRefusal

GROUPS = ("tp", "pp", "dcp", "attn_tp", "attn_cp", "attn_dp", "moe_tp", "moe_ep", "moe_dp")


@dataclass(frozen=True)
class Topology:
    """Sizes of one deployment, in ranks. `attn_dp` is 1 where attention is not data parallel."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    moe_ep: int = 1
    moe_dp: int = 1
    nnodes: int = 1

    @property
    def attn_tp(self) -> int:
        """Ranks that share one sequence's attention heads."""
        return self.tp // (self.attn_dp * self.attn_cp)

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert's intermediate size."""
        return self.tp // (self.moe_ep * self.moe_dp)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    def size(self, group: str) -> int:
        """Return the size of a group by its name in `GROUPS`."""
        return int(getattr(self, group))

    def derived(self) -> dict[str, int]:
        """Return the published leaves that follow from the declared ones."""
        return {
            "world_size": self.world_size,
            "attn_dp_size": self.attn_dp,
            "attn_tp_size": self.attn_tp,
            "moe_ep_size": self.moe_ep,
            "moe_tp_size": self.moe_tp,
        }

    def group(self, name: str, world_rank: int) -> tuple[int, ...]:
        """Return the world ranks of the group of this name that `world_rank` is in, ascending by the group's own order."""
        stage, t = divmod(world_rank, self.tp)
        if name == "pp":
            return tuple(s * self.tp + t for s in range(self.pp))
        # Each group varies one coordinate: `stride` ranks apart, `size` of them, within blocks of stride * size.
        stride = {
            "attn_cp": self.attn_tp,
            "attn_dp": self.attn_tp * self.attn_cp,
            "moe_ep": self.moe_tp,
            "moe_dp": self.moe_tp * self.moe_ep,
        }.get(name, 1)
        size = self.size(name)
        first = t // (stride * size) * (stride * size) + t % stride
        return tuple(stage * self.tp + first + i * stride for i in range(size))

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """Return every group of this name, each once, in ascending order."""
        return sorted({self.group(name, rank) for rank in range(self.world_size)})


def make_topology(parallel: Mapping[str, Any]) -> Topology:
    """Return the topology that published or given `parallel` values describe.

    Raises `ArgumentRefusal` where sizes do not multiply out or switches contradict each other.
    """
    tp, dp, cp = parallel["tp_size"], parallel["dp_size"], parallel["attn_cp_size"]
    ep, moe_dp, pp = parallel["ep_size"], parallel["moe_dp_size"], parallel["pp_size"]
    attn_dp = dp if parallel["enable_dp_attention"] else 1
    if tp % (attn_dp * cp):
        _refuse(
            "--tp-size",
            tp,
            f"--dp-size ({attn_dp}, for attention) x --attn-cp-size ({cp})",
            "a multiple of their product",
        )
    if tp % (ep * moe_dp):
        _refuse("--tp-size", tp, f"--ep-size ({ep}) x --moe-dp-size ({moe_dp})", "a multiple of their product")
    if tp % parallel["dcp_size"]:
        _refuse("--tp-size", tp, f"--dcp-size ({parallel['dcp_size']})", "a multiple of it")
    if moe_dp > 1 and pp > 1:
        raise ArgumentRefusal(f"--moe-dp-size: {moe_dp} with --pp-size {pp}; only one of them may be above 1")
    if moe_dp > 1 and ep > 1 and ep * moe_dp != tp:
        raise ArgumentRefusal(f"--moe-dp-size: {moe_dp} with --ep-size {ep} needs --tp-size {ep * moe_dp}, given {tp}")
    if moe_dp > 1 and cp != moe_dp:
        raise ArgumentRefusal(f"--moe-dp-size: {moe_dp} needs --attn-cp-size {moe_dp}, given {cp}")
    if parallel["moe_dense_tp_size"] not in (None, 1, tp):
        raise ArgumentRefusal(
            f"--moe-dense-tp-size: {parallel['moe_dense_tp_size']} is not 1 or the --tp-size ({tp}); leave it out for the latter"
        )
    if parallel["enable_dp_lm_head"] and not parallel["enable_dp_attention"]:
        raise ArgumentRefusal("--enable-dp-lm-head: only with --enable-dp-attention")
    if (tp * pp) % parallel["nnodes"]:
        raise ArgumentRefusal(
            f"--nnodes: {parallel['nnodes']} does not divide the {tp * pp} ranks of --tp-size x --pp-size"
        )
    if not 0 <= parallel["node_rank"] < parallel["nnodes"]:
        raise ArgumentRefusal(f"--node-rank: {parallel['node_rank']} is not below --nnodes ({parallel['nnodes']})")
    return Topology(tp, pp, parallel["dcp_size"], attn_dp, cp, ep, moe_dp, parallel["nnodes"])


def _refuse(flag: str, given: int, factors: str, needed: str) -> None:
    raise ArgumentRefusal(f"{flag}: {given} is not divided by {factors}; give {needed}")
