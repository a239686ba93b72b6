"""A client of an engine's HTTP surface (SPEC 7). Every reply is checked against a schema before a test sees it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import requests

from conformance.targets.fault import TargetFault

Reply = TypeVar("Reply")

#: Seconds until a request that gets no answer at all fails. Far above what a small model needs.
REQUEST_SECONDS = 60.0


class BadReply(TargetFault):
    """An engine's reply is no success or has not the shape of SPEC 7; the text names the request and what is wrong."""


class RankInfo(msgspec.Struct, frozen=True):
    """What an engine says of one of its ranks. What had to be agreed with a daemon may be null where there was none."""

    tp_rank: int
    device: str
    pid: int
    source: str
    transport: str | None
    key: str | None
    layout_hash: str
    checkpoint: str | None
    checkpoint_verified: str | None
    epoch: int | None
    digests: dict[str, list[str]]
    digest_state: str
    load_seconds: float
    daemon_pid: int | None
    daemon_alive: bool | None


class ServerInfo(msgspec.Struct, frozen=True):
    """The reply of `GET /server_info`; `pids` are all processes of the engine."""

    version: str
    arguments: dict[str, Any]
    published: dict[str, dict[str, Any]]
    ready: bool
    pids: list[int]
    ranks: list[RankInfo]


#: Log-probability (null for the first token of a prompt), token id, text.
TokenLogprob = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct, frozen=True):
    """What `/generate` tells beside the tokens; the lists of log-probabilities are there if they were asked for."""

    finish_reason: Any
    prompt_tokens: int
    completion_tokens: int
    input_token_logprobs: list[TokenLogprob] | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None


class Generated(msgspec.Struct, frozen=True):
    """The reply of `POST /generate`."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class EngineClient:
    """Talks to one engine. Use as a context manager, or call `close`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the environment has no business on a loopback address

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def server_info(self) -> ServerInfo:
        """Return `GET /server_info`. Raises `BadReply`."""
        return self._ask("GET", "/server_info", ServerInfo)

    def generate(
        self,
        input_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        top_logprobs_num: int = 0,
    ) -> Generated:
        """Generate from token ids, with the log-probabilities of prompt and output. Raises `BadReply`."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": ignore_eos}
        body = {
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_logprobs_num,
        }
        return self._ask("POST", "/generate", Generated, body)

    def _ask(self, method: str, path: str, schema: type[Reply], body: Any = None) -> Reply:
        try:
            reply = self._session.request(method, self.url + path, json=body, timeout=REQUEST_SECONDS)
        except requests.RequestException as error:
            raise BadReply(f"{method} {path}: {error}") from error
        if reply.status_code != 200:
            raise BadReply(f"{method} {path}: HTTP {reply.status_code}: {reply.text[:500]}")
        try:
            return msgspec.json.decode(reply.content, type=schema)
        except msgspec.DecodeError as error:
            raise BadReply(f"{method} {path}: {error}") from error
