"""Every launch argument, declared once.

The command line, its help, validation, the published namespaces, `/server_info`, what a daemon reports and the page
`ARGUMENTS.md` are all made from the fields of `ServerArgs`. Names follow SGLang's server arguments where it has them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

NAMESPACES = {
    "model": "model: which checkpoint, and how its tensors are read",
    "parallel": "parallel: how the model is spread over ranks",
    "exec": "exec: how batches are run",
    "exec.moe": "exec.moe: where experts lie and how tokens reach them",
    "cache": "cache: the weight cache daemon",
    "server": "server: HTTP",
}


@dataclass(frozen=True)
class Declaration:
    """What is known of one argument besides its type and default.

    `changes_bytes` says whether another value can change which bytes a rank holds, given the same checkpoint.
    """

    flags: tuple[str, ...]
    namespace: str
    help: str
    changes_bytes: bool
    choices: tuple[Any, ...] | None
    minimum: int | None
    maximum: int | None


def argument(
    *flags: str,
    namespace: str,
    help: str,
    default: Any = dataclasses.MISSING,
    changes_bytes: bool = False,
    choices: tuple[Any, ...] | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
) -> Any:
    """Declare a field of `ServerArgs`. An argument without a default is required; a `bool` is a switch."""
    declaration = Declaration(flags, namespace, help, changes_bytes, choices, minimum, maximum)
    return field(default=default, metadata={"declaration": declaration})


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The launch arguments as given. Only `context.publish` reads them; everyone else reads what was published."""

    model_path: str = argument(
        "--model-path",
        "--model",
        namespace="model",
        changes_bytes=True,
        help="directory of a Hugging Face checkpoint: config.json, safetensors shards, tokenizer.json",
    )
    served_model_name: str | None = argument(
        "--served-model-name",
        namespace="model",
        default=None,
        help="name that /v1/models and replies give; the directory's name when left out",
    )
    dtype: str = argument(
        "--dtype",
        namespace="model",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        changes_bytes=True,
        help="element type of the weights a rank holds; auto takes the checkpoint's",
    )
    context_length: int | None = argument(
        "--context-length",
        namespace="model",
        default=None,
        minimum=1,
        help="longest sequence, in tokens; the model's max_position_embeddings when left out",
    )
    device: str = argument(
        "--device",
        namespace="model",
        default="cpu",
        choices=("cpu",),
        help="where weights live and batches run",
    )
    tp_size: int = argument(
        "--tp-size",
        "--tp",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="tensor parallel size: one process a rank",
    )
    pp_size: int = argument(
        "--pp-size",
        "--pipeline-parallel-size",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="pipeline stages, each with its own layers",
    )
    dp_size: int = argument(
        "--dp-size",
        "--dp",
        "--data-parallel-size",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="data parallel size of attention, with --enable-dp-attention",
    )
    enable_dp_attention: bool = argument(
        "--enable-dp-attention",
        namespace="parallel",
        default=False,
        changes_bytes=True,
        help="split requests, not attention heads, over --dp-size parts of the tensor parallel ranks",
    )
    enable_dp_lm_head: bool = argument(
        "--enable-dp-lm-head",
        namespace="parallel",
        default=False,
        changes_bytes=True,
        help="split the LM head within an attention part instead of over all ranks",
    )
    attn_cp_size: int = argument(
        "--attn-cp-size",
        "--attention-context-parallel-size",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="ranks that share one sequence's prompt in attention",
    )
    dcp_size: int = argument(
        "--dcp-size",
        "--decode-context-parallel-size",
        namespace="parallel",
        default=1,
        minimum=1,
        help="ranks that share one sequence's KV cache in decoding",
    )
    ep_size: int = argument(
        "--ep-size",
        "--ep",
        "--expert-parallel-size",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="parts over which expert slots are spread",
    )
    moe_dp_size: int = argument(
        "--moe-dp-size",
        "--moe-data-parallel-size",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="copies of all experts within the tensor parallel ranks",
    )
    moe_dense_tp_size: int | None = argument(
        "--moe-dense-tp-size",
        namespace="parallel",
        default=None,
        minimum=1,
        changes_bytes=True,
        help="tensor parallel size of dense layers in MoE models: 1 or, when left out, the --tp-size",
    )
    nnodes: int = argument(
        "--nnodes",
        namespace="parallel",
        default=1,
        minimum=1,
        changes_bytes=True,
        help="hosts; expert placement prefers replicas on the same one",
    )
    node_rank: int = argument(
        "--node-rank", namespace="parallel", default=0, minimum=0, help="which of the hosts this is"
    )
    base_gpu_id: int = argument(
        "--base-gpu-id",
        namespace="parallel",
        default=0,
        minimum=0,
        help="device index of local rank 0; local rank r uses the one r further on",
    )
    random_seed: int = argument(
        "--random-seed",
        namespace="exec",
        default=42,
        minimum=0,
        help="seed of sampled decoding where a request brings none",
    )
    max_running_requests: int = argument(
        "--max-running-requests",
        namespace="exec",
        default=64,
        minimum=1,
        help="requests decoded together at the most",
    )
    max_total_tokens: int = argument(
        "--max-total-tokens",
        namespace="exec",
        default=8192,
        minimum=16,
        help="tokens that the KV pool holds",
    )
    max_prefill_tokens: int = argument(
        "--max-prefill-tokens",
        namespace="exec",
        default=4096,
        minimum=1,
        help="prompt tokens run in one prefill batch; a longer prompt gets a batch of its own",
    )
    page_size: int = argument(
        "--page-size",
        namespace="exec",
        default=16,
        minimum=1,
        help="tokens a block of the KV pool",
    )
    moe_a2a_backend: str = argument(
        "--moe-a2a-backend",
        namespace="exec.moe",
        default="none",
        choices=("none",),
        help="how tokens travel to other ranks' experts; none gathers all tokens on all ranks",
    )
    enable_eplb: bool = argument(
        "--enable-eplb",
        namespace="exec.moe",
        default=False,
        help="balance experts over slots by recorded load while serving",
    )
    ep_num_redundant_experts: int = argument(
        "--ep-num-redundant-experts",
        namespace="exec.moe",
        default=0,
        minimum=0,
        changes_bytes=True,
        help="expert slots besides one for each logical expert, filled with replicas",
    )
    init_expert_location: str = argument(
        "--init-expert-location",
        namespace="exec.moe",
        default="trivial",
        changes_bytes=True,
        help="which logical expert each slot starts with: trivial, a .json or .pt file, or inline JSON",
    )
    eplb_algorithm: str = argument(
        "--eplb-algorithm",
        namespace="exec.moe",
        default="auto",
        choices=("auto", "deepseek", "deepseek_hierarchical"),
        changes_bytes=True,
        help="how recorded counts become a placement",
    )
    ep_dispatch_algorithm: str | None = argument(
        "--ep-dispatch-algorithm",
        namespace="exec.moe",
        default=None,
        choices=("static", "dynamic", "fake"),
        help="which replica of an expert a token goes to",
    )
    weight_cache_mode: str = argument(
        "--weight-cache-mode",
        namespace="cache",
        default="off",
        choices=("off", "client", "daemon"),
        help="off reads the disk; client attaches to a daemon that is there; daemon starts one, then attaches",
    )
    weight_cache_transport: str = argument(
        "--weight-cache-transport",
        namespace="cache",
        default="auto",
        choices=("auto", "shm"),
        help="how the slab is shared; auto is shm (a sealed memfd) on cpu",
    )
    weight_cache_fallback: str = argument(
        "--weight-cache-fallback",
        namespace="cache",
        default="refuse",
        choices=("refuse", "disk"),
        help="what client does when no daemon holds this rank's key: refuse to start, or say so and read the disk",
    )
    weight_cache_detach: bool = argument(
        "--weight-cache-detach",
        namespace="cache",
        default=False,
        help="daemon mode: leave the daemon running when the engine ends",
    )
    weight_cache_timeout: float = argument(
        "--weight-cache-timeout",
        namespace="cache",
        default=1800.0,
        minimum=1,
        help="seconds to wait for a daemon that is still loading",
    )
    weight_cache_verify: str = argument(
        "--weight-cache-verify",
        namespace="cache",
        default="full",
        choices=("full", "skip"),
        help="full digests every mapped tensor before serving; skip trusts the daemon and says so in /server_info",
    )
    checkpoint_verify: str = argument(
        "--checkpoint-verify",
        namespace="cache",
        default="full",
        choices=("full", "sampled"),
        help="how client compares shard files nobody has digested yet with the daemon's: every byte, or samples only",
    )
    host: str = argument("--host", namespace="server", default="127.0.0.1", help="address to listen on")
    port: int = argument(
        "--port",
        namespace="server",
        default=30000,
        minimum=0,
        maximum=65535,
        help="port to listen on; 0 takes a free one and prints it",
    )


def declarations() -> dict[str, Declaration]:
    """Return each argument's declaration by field name, in the order of the help."""
    return {f.name: f.metadata["declaration"] for f in dataclasses.fields(ServerArgs)}


def changes_bytes() -> tuple[str, ...]:
    """Return the names of the arguments that can change which bytes a rank holds."""
    return tuple(name for name, declaration in declarations().items() if declaration.changes_bytes)
