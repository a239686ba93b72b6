"""Every declared argument reaches every process that is started: none is dropped, defaulted or projected on the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from conformance.checkpoints import Recipe, ensure
from conformance.deployment import settles
from conformance.probe.registry import places
from conformance.probe.wcp1 import Connection
from conformance.selftest.reference_process import open_workshop
from matrix.space import load_space
from reference.args import ServerArgs, declarations
from reference.context import override_server_args
from reference.errors import ArgumentRefusal
from reference.parallel import check_served

#: A value for each argument that no default has.
GIVEN: dict[str, Any] = {
    "served_model_name": "another-name",
    "dtype": "bfloat16",
    "context_length": 200,
    "tp_size": 2,
    "base_gpu_id": 3,
    "random_seed": 7,
    "max_running_requests": 5,
    "max_total_tokens": 640,
    "max_prefill_tokens": 99,
    "page_size": 8,
    "eplb_algorithm": "deepseek",
    "weight_cache_mode": "daemon",
    "weight_cache_transport": "shm",
    "weight_cache_fallback": "disk",
    "weight_cache_detach": True,
    "weight_cache_timeout": 77.5,
    "weight_cache_verify": "skip",
    "checkpoint_verify": "sampled",
    "host": "localhost",
}
#: What the engine can't run with another value yet, or has one value only. Each is refused loudly, or not a choice.
ONE_VALUE = {
    "device": None,
    "moe_a2a_backend": None,
    "pp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "enable_dp_lm_head": True,
    "attn_cp_size": 2,
    "dcp_size": 2,
    "ep_size": 2,
    "moe_dp_size": 2,
    "moe_dense_tp_size": 1,
    "nnodes": 2,
    "node_rank": 1,
    "enable_eplb": True,
    "ep_num_redundant_experts": 2,
    "init_expert_location": "{}",
    "ep_dispatch_algorithm": "dynamic",
}


def flags(values: dict[str, Any]) -> list[str]:
    """Spell values as a command line."""
    line: list[str] = []
    for name, value in values.items():
        line += [declarations()[name].flags[-1], *([] if value is True else [str(value)])]
    return line


@dataclasses.dataclass(frozen=True)
class Told:
    """What each process says of its configuration, by argument."""

    engine: dict[str, Any]
    daemons: list[dict[str, Any]]
    given: dict[str, Any]


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure(Recipe.of(load_space().model("qwen3-tiny"))).path


@pytest.fixture(scope="module")
def told(model: Path) -> Iterator[Told]:
    with open_workshop() as workshop:
        with socket.create_server(("localhost", 0)) as free:
            given = {"model_path": str(model), "port": free.getsockname()[1], **GIVEN}
        extra = {name: value for name, value in given.items() if name not in ("model_path", "port")}
        engine, url = workshop.engine(model, "--port", str(given["port"]), *flags(extra))
        info = requests.get(f"{url}/server_info", timeout=60).json()
        daemons = []
        for place in places(workshop.registry):
            with Connection(place.socket) as connection:
                daemons.append(connection.status())
        yield Told(flat(info["published"]), [flat(status.arguments) for status in daemons], given)
        assert engine.stop().clean
        for status in daemons:
            os.kill(status.pid, signal.SIGTERM)
        assert settles(lambda: workshop.left_over() == [])


def flat(namespaces: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for leaves in namespaces.values() for name, value in leaves.items()}


@pytest.mark.parametrize("name", declarations())
def test_argument_reaches_every_process(told: Told, name: str) -> None:
    default = {spec.name: spec.default for spec in dataclasses.fields(ServerArgs)}[name]
    expected = told.given.get(name, default)
    assert (expected != default) == (name not in ONE_VALUE), f"{name}: give it a value that is not its default"
    assert told.engine[name] == expected
    assert len(told.daemons) == 2
    assert [daemon[name] for daemon in told.daemons] == [expected] * 2


@pytest.mark.parametrize("name", [name for name, value in ONE_VALUE.items() if value is not None])
def test_argument_of_one_value_refuses_another(model: Path, name: str) -> None:
    with pytest.raises(ArgumentRefusal, match=declarations()[name].flags[0]):
        publish_and_check(ServerArgs(model_path=str(model), **{name: ONE_VALUE[name]}))


def publish_and_check(args: ServerArgs) -> None:
    """What both commands do before they start a process."""
    with override_server_args(**dataclasses.asdict(args)):
        check_served()
