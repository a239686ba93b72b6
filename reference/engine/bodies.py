"""What a client may send: the bodies of `/generate` and of the OpenAI endpoints, and how they are checked.

A field that is not known, or that would change the output in a way that is not supported, is refused: an answer that
quietly ignores what was asked is worse than none. Fields that can't change the output are accepted.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import msgspec

from reference.engine.messages import RequestRefusal, SamplingParams

Body = TypeVar("Body", bound=msgspec.Struct)
Strings = str | list[str] | None


class GenerateSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`sampling_params` of `/generate`, under SGLang's names."""

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    sampling_seed: int | None = None
    ignore_eos: bool = False
    stop: Strings = None
    stop_token_ids: list[int] | None = None


class GenerateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `/generate`: one of `text` and `input_ids`; a list of either is a batch."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    stream: bool = False


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options` of OpenAI's endpoints."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _OpenAIBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both OpenAI endpoints take. `top_k`, `ignore_eos`, `stop_token_ids` go beyond OpenAI, as elsewhere."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: Strings = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    # Accepted, since they can't change the output.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    # Accepted where they ask for nothing.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None


class CompletionBody(_OpenAIBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`. `logprobs` is the number of top tokens, up to the vocabulary's size."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None


class ChatBody(_OpenAIBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`. `chat_template_kwargs` go to the template, as in SGLang and vLLM."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


# Values by which a field asks for nothing, besides null.
_NEUTRAL: dict[str, Collection[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "image_url": [],
    "input_audio": [],
    "file": [],
    "refusal": [],
    "annotations": [[]],
    "audio": [],
    "function_call": ["none"],
    "tool_calls": [[]],
    "functions": [[]],
    "modalities": [["text"]],
    "parallel_tool_calls": [True, False],
    "prediction": [],
    "reasoning_effort": [],
    "response_format": [{"type": "text"}],
    "tool_choice": ["none"],
    "tools": [[]],
    "verbosity": [],
    "web_search_options": [],
}

_NESTED: dict[str, type[msgspec.Struct]] = {
    "sampling_params": GenerateSampling,
    "stream_options": StreamOptions,
    "messages": ChatMessage,
    "messages.content": ContentPart,
}


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """Decode and check a JSON body. Raises `RequestRefusal` naming the field, what was given and what is allowed."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefusal(f"body: not valid JSON: {error}") from error
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw, kind) from error


def refuse_unsupported(struct: msgspec.Struct, path: str = "") -> None:
    """Refuse a field of the struct that asks for something that is not supported."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            allowed = " or ".join(["leaving it out", *map(repr, _NEUTRAL[name])])
            message = f"{path}{name}: {reprlib.repr(value)} given, which is not supported; allowed: {allowed}"
            raise RequestRefusal(message, param=path + name, code="unsupported_parameter")


def check_tokens(ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Return a prompt's token ids; refuse one that is empty, or has ids outside the vocabulary."""
    bad = [token for token in ids if not 0 <= token < vocab_size]
    if bad:
        raise RequestRefusal(f"{param}: token id {bad[0]} given, allowed: 0 to {vocab_size - 1}", param=param)
    if not ids:
        raise RequestRefusal(f"{param}: no tokens given, at least 1 is needed", param=param)
    return tuple(ids)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number outside `[low, high]`."""
    if not low <= value <= high:
        raise RequestRefusal(f"{name}: {value} given, allowed: {low} to {high}", param=name)


def make_sampling(names: dict[str, str], **values: Any) -> SamplingParams:
    """Make the parameters, None meaning the default. A refusal speaks of a field as `names` calls it."""
    try:
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except RequestRefusal as refusal:
        field = refusal.param or ""
        shown = names.get(field, field)
        raise RequestRefusal(shown + str(refusal).removeprefix(field), param=shown) from None


def stop_strings(stop: Strings) -> tuple[str, ...]:
    """Return the stop strings of a body's `stop`."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in strings:
        raise RequestRefusal("stop: '' given, allowed: strings that are not empty", param="stop")
    return strings


def _explain(message: str, raw: Any, kind: type[msgspec.Struct]) -> RequestRefusal:
    """Add the field's name and its value to what msgspec says: `Expected `int`, got `str` - at `$.n``."""
    reason, _, at = message.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    if named := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", reason):
        param = f"{path}.{named[2]}".lstrip(".")
        if named[1] == "missing required":
            return RequestRefusal(f"{param}: nothing given, it is required", param=param)
        fields = _NESTED.get(re.sub(r"\[.*?\]", "", path), kind).__struct_fields__
        return RequestRefusal(f"{param}: not a known field, allowed: {', '.join(fields)}", param=param)
    given = raw
    for key, index in re.findall(r"([^.\[\]]+)(?![^\[]*\])|\[(\d+)\]", path):
        given = given[int(index)] if index else given.get(key)
    expected = reason[:1].lower() + reason[1:].replace("`", "")
    return RequestRefusal(f"{path or 'body'}: {reprlib.repr(given)} given, {expected}", param=path or None)
