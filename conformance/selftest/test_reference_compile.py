"""Reads of the published configuration inside compiled forward passes: traced whole, and no recompilation for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from reference.context import Ranks, get_context, get_exec, get_parallel, override_server_args
from reference.parallel import initialize_groups, require_mlp_sync, require_mlp_tp_gather


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    torch._dynamo.reset()
    with override_server_args(tp_size=4, ep_size=2, ranks=Ranks(3, 3)):
        initialize_groups()
        yield
    torch._dynamo.reset()


def forward(x: torch.Tensor) -> torch.Tensor:
    parallel = get_parallel()
    x = x * parallel.tp_size + parallel.ep_size + parallel.moe_ep_rank + parallel.attn_tp_size
    if require_mlp_tp_gather() or require_mlp_sync() or get_exec().moe.enable_eplb:
        x = x + 100
    return x


def compiled() -> tuple[Callable[[torch.Tensor], torch.Tensor], CompileCounter]:
    counter = CompileCounter()
    return torch.compile(forward, fullgraph=True, backend=counter), counter


def test_parallel_config_leaves_trace_under_torch_compile() -> None:
    """`fullgraph` refuses a graph break; the values are those that eager reads."""
    function, counter = compiled()
    x = torch.ones(3)
    assert torch.equal(function(x), forward(x))
    assert counter.frame_count == 1


def test_an_unrelated_override_recompiles_nothing() -> None:
    function, counter = compiled()
    function(torch.ones(3))
    get_context().override("tune", base_gpu_id=2, page_size=32)
    assert torch.equal(function(torch.ones(3)), forward(torch.ones(3)))
    assert counter.frame_count == 1


def test_an_override_of_what_was_read_is_seen() -> None:
    function, counter = compiled()
    before = function(torch.ones(3))
    get_context().override("balance", enable_eplb=True)
    after = function(torch.ones(3))
    assert torch.equal(after, before + 100)
    assert counter.frame_count == 2
