"""One rank of the engine: from its groups to its weights to the loop that runs batches."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

from reference.cache.acquire import Weights, acquire_weights
from reference.cache.client import wait_for_end
from reference.context import Ranks, get_cache, get_exec, get_model, get_parallel, publish_ranks
from reference.engine.channel import Channel
from reference.engine.kv import BlockPool, KVCache
from reference.engine.messages import EngineRequest
from reference.engine.ranks import Changed, Ready, Report
from reference.engine.scheduler import Scheduler
from reference.engine.tokenizer import eos_token_ids
from reference.engine.worker import run_worker
from reference.errors import Refusal
from reference.models import build_model
from reference.models.qwen3 import Qwen3ForCausalLM
from reference.parallel import destroy_groups, device_name, initialize_groups, limit_threads
from reference.weights.checkpoint import Checkpoint
from reference.weights.fill import bind
from reference.weights.plan import RankPlan, plan_rank


def run_rank(rank: int, report: Report, rendezvous: socket.socket | None, requests: socket.socket | None) -> None:
    """Be one rank until told to stop. Rank 0 alone has `requests`, the stream from and to the HTTP process."""
    started = time.monotonic()
    # A service manager signals every process of the engine; the parent decides when its ranks end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    publish_ranks(Ranks(world_rank=rank, local_rank=rank))
    limit_threads()
    initialize_groups(rendezvous)
    stages = {"groups": time.monotonic() - started}
    checkpoint = Checkpoint.open(get_model().model_path)
    model = build_model(checkpoint, get_model().dtype)
    plan = plan_rank(model, checkpoint)
    stages["plan"] = time.monotonic() - started
    if get_cache().weight_cache_mode == "daemon" and report.receive() is None:
        return
    begun = time.monotonic()
    weights = acquire_weights(plan, checkpoint, device_name(), rank)
    stages["weights"] = load_seconds = time.monotonic() - begun
    bind(model, plan, weights.slab.tensor())
    kv_cache, scheduler = _make_pool(model, checkpoint, first=rank == 0)
    report.send(Ready(_describe(rank, plan, weights, load_seconds, stages)))
    if weights.lease is not None:
        lease = weights.lease

        def watch() -> None:
            wait_for_end(lease)
            report.send(Changed({"daemon_alive": False}))

        threading.Thread(target=watch, name="lease", daemon=True).start()
    channel: Channel[EngineRequest] | None = Channel(requests, EngineRequest) if requests is not None else None
    vocab_size = int(checkpoint.config["vocab_size"])
    run_worker(model, kv_cache, scheduler, channel, get_parallel().tp_group.broadcast_bytes, vocab_size=vocab_size)
    destroy_groups()


def context_length(checkpoint: Checkpoint) -> int:
    """Return the longest sequence served, in tokens. Raises `Refusal` where more is asked than the model can."""
    limit = int(checkpoint.config["max_position_embeddings"])
    asked = get_model().context_length
    if asked is not None and asked > limit:
        raise Refusal(f"--context-length: {asked} is more than the model's max_position_embeddings ({limit})")
    return asked or limit


def num_blocks() -> int:
    """Return how many KV blocks the pool has."""
    return int(-(-get_exec().max_total_tokens // get_exec().page_size))


def max_total_tokens() -> int:
    """Return how many tokens the KV pool holds: what was asked for, in whole blocks."""
    return num_blocks() * int(get_exec().page_size)


def _make_pool(model: Qwen3ForCausalLM, checkpoint: Checkpoint, first: bool) -> tuple[KVCache, Scheduler | None]:
    page_size = get_exec().page_size
    kv_cache = KVCache.allocate(model.num_layers, num_blocks(), page_size, model.kv_heads, model.head_dim, model.dtype)
    if not first:
        return kv_cache, None
    scheduler = Scheduler(
        BlockPool(num_blocks(), page_size),
        get_exec().max_running_requests,
        get_exec().max_prefill_tokens,
        context_length(checkpoint),
        eos_token_ids(checkpoint.path),
        get_exec().random_seed,
    )
    return kv_cache, scheduler


def _describe(
    rank: int, plan: RankPlan, weights: Weights, load_seconds: float, stages: dict[str, float]
) -> dict[str, object]:
    return {
        "tp_rank": rank,
        "device": device_name(),
        "pid": os.getpid(),
        "source": weights.source,
        "transport": weights.transport,
        "key": weights.key,
        "layout_hash": plan.layout_hash,
        "checkpoint": weights.checkpoint,
        "checkpoint_verified": weights.checkpoint_verified,
        "epoch": weights.epoch,
        "digests": weights.digests,
        "digest_state": weights.digest_state,
        "slab_bytes": plan.slab_size,
        "load_seconds": load_seconds,
        "stage_seconds": stages,
        "daemon_pid": weights.daemon_pid,
        "daemon_alive": True if weights.lease is not None else None,
    }
