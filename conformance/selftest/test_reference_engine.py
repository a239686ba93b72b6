"""The reference engine as its users meet it: real processes, real HTTP, the `openai` client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests

from conformance.checkpoints import Checkpoint, Recipe, ensure
from conformance.deployment import settles
from conformance.selftest.reference_process import Workshop, open_workshop
from matrix.space import load_space

PROMPT = "The weight cache daemon keeps"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return ensure(Recipe.of(load_space().model("qwen3-moe-tiny")))


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint.path


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with open_workshop() as workshop:
        yield workshop


@pytest.fixture(scope="module")
def url(workshop: Workshop, model: Path) -> str:
    """An engine of two ranks that reads the disk."""
    return workshop.engine(model, "--tp-size", "2")[1]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def generate(url: str, **body: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **body.pop("sampling_params", {})}
    reply = requests.post(f"{url}/generate", json={"text": PROMPT, **body, "sampling_params": sampling}, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_openai_client_lists_the_model(client: openai.OpenAI, model: Path) -> None:
    assert [entry.id for entry in client.models.list()] == [model.name]


def test_openai_completion_streams_what_it_answers_whole(client: openai.OpenAI, model: Path) -> None:
    asked = {"model": model.name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "seed": 7}
    whole = client.completions.create(**asked)
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert whole.choices[0].text
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 16


def test_openai_chat_streams_what_it_answers_whole(client: openai.OpenAI, model: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which expert?"}]
    asked = {"model": model.name, "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"


def test_seed_decides_a_sampled_answer(url: str) -> None:
    def draw(seed: int) -> list[int]:
        sampling = {"temperature": 1.0, "sampling_seed": seed}
        ids: list[int] = generate(url, sampling_params=sampling)["output_ids"]
        return ids

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(5)}) > 1


def test_many_requests_at_once_get_their_own_answers(url: str, checkpoint: Checkpoint) -> None:
    """Continuous batching: 24 requests of different prompts and lengths, each equal to its answer alone."""
    prompts = [list(answer.input_ids) for answer in checkpoint.answers]
    asked = [(prompts[i % len(prompts)], 4 + i % 7) for i in range(24)]

    def ask(job: tuple[list[int], int]) -> list[int]:
        body = {"text": None, "input_ids": job[0], "sampling_params": {"max_new_tokens": job[1]}}
        ids: list[int] = generate(url, **body)["output_ids"]
        return ids

    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, asked))
    for (prompt, count), ids in zip(asked, together, strict=True):
        expected = next(answer for answer in checkpoint.answers if list(answer.input_ids) == prompt)
        assert ids == list(expected.output_ids[:count])


def test_a_small_pool_retracts_and_still_answers_all(workshop: Workshop, checkpoint: Checkpoint) -> None:
    engine, url = workshop.engine(checkpoint.path, "--max-total-tokens", "64", "--page-size", "4")
    prompt = list(min((a.input_ids for a in checkpoint.answers), key=len))
    body = {"text": None, "input_ids": prompt, "sampling_params": {"max_new_tokens": 60 - len(prompt)}}
    alone = generate(url, **body)["output_ids"]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda _: generate(url, **body)["output_ids"], range(6)))
    assert together == [alone] * 6
    assert engine.stop().clean


def test_server_info_says_what_was_published(url: str, model: Path) -> None:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    assert info["ready"] is True
    assert info["published"]["parallel"]["tp_size"] == 2
    assert info["arguments"]["model_path"] == str(model)
    assert [rank["tp_rank"] for rank in info["ranks"]] == [0, 1]
    assert {rank["source"] for rank in info["ranks"]} == {"disk"}
    assert all(psutil.pid_exists(pid) for pid in info["pids"])


def test_killed_daemon_changes_no_answer_and_is_told(workshop: Workshop, model: Path) -> None:
    """The mapping outlives its owner: the engine goes on, bit for bit, and says that the daemon is gone."""
    daemon = workshop.daemon(model)
    engine, url = workshop.engine(model, "--weight-cache-mode", "client")
    before = generate(url, return_logprob=True, logprob_start_len=0)
    rank = requests.get(f"{url}/server_info", timeout=60).json()["ranks"][0]
    assert rank["source"] == "cache"
    assert rank["daemon_alive"] is True
    os.kill(rank["daemon_pid"], signal.SIGKILL)
    assert settles(lambda: not daemon.alive)
    assert daemon.stop().status == 1
    # A killed rank can't clear its place; who watched it does.
    assert workshop.left_over() == []

    def told() -> bool:
        info = requests.get(f"{url}/server_info", timeout=60).json()
        return info["ranks"][0]["daemon_alive"] is False

    assert settles(told)
    after = generate(url, return_logprob=True, logprob_start_len=0)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["input_token_logprobs"] == before["meta_info"]["input_token_logprobs"]
    assert after["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]
    assert engine.stop().clean


def test_killed_rank_ends_the_engine_with_its_reason(workshop: Workshop, model: Path) -> None:
    engine, url = workshop.engine(model, "--tp-size", "2")
    os.kill(requests.get(f"{url}/server_info", timeout=60).json()["ranks"][1]["pid"], signal.SIGKILL)
    assert settles(lambda: not engine.alive)
    assert engine.stop().status == 1
    assert "killed by SIGKILL" in engine.tail()


def test_daemon_mode_ends_its_daemon_unless_detached(workshop: Workshop, model: Path) -> None:
    engine, url = workshop.engine(model, "--weight-cache-mode", "daemon")
    assert requests.get(f"{url}/server_info", timeout=60).json()["ranks"][0]["source"] == "cache"
    assert engine.stop().clean
    assert workshop.left_over() == []

    engine, url = workshop.engine(model, "--weight-cache-mode", "daemon", "--weight-cache-detach")
    first = requests.get(f"{url}/server_info", timeout=60).json()["ranks"][0]
    assert engine.stop().clean
    engine, url = workshop.engine(model, "--weight-cache-mode", "client")
    second = requests.get(f"{url}/server_info", timeout=60).json()["ranks"][0]
    assert (second["source"], second["daemon_pid"]) == ("cache", first["daemon_pid"])
    assert engine.stop().clean
    os.kill(first["daemon_pid"], signal.SIGTERM)
    assert settles(lambda: workshop.left_over() == [])
