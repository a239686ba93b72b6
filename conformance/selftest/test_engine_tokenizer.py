"""Tokenizer, chat template and detokenizer, against transformers and against the whole text."""

from __future__ import annotations

import json
from itertools import chain

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.selftest.tiny_engine import VOCAB_SIZE, make_tokenizer
from reference.engine.detokenizer import Detokenizer, StopStrings
from reference.engine.messages import RequestRefusal
from reference.engine.tokenizer import Tokenizer, eos_token_ids
from reference.errors import CheckpointRefusal

TEXTS = ["the cat sat", " hat", "naïve 😀 日本", "<|im_start|>user\nhi<|im_end|>", ""]
MESSAGES = [{"role": "user", "content": "the é"}, {"role": "assistant", "content": "cat"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


def test_it_is_the_tokenizer_that_transformers_loads(directory, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for variables in ({}, {"shout": True}):
        expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, **variables)
        ids = tokenizer.apply_chat_template(MESSAGES, **variables)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
        assert ids == theirs.encode(expected, add_special_tokens=False)


def test_special_tokens_frame_a_text_but_not_a_template_that_writes_its_own(tmp_path):
    file = make_tokenizer(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    framed = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    backend.post_processor = framed
    backend.save(str(file))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the")[0] == 0
    assert 0 not in tokenizer.apply_chat_template(MESSAGES)


def test_a_template_that_declines_says_so(tokenizer):
    with pytest.raises(RequestRefusal, match="messages: the chat template declines them: no developer role"):
        tokenizer.apply_chat_template([{"role": "developer", "content": "x"}])


def test_a_template_cannot_leave_its_sandbox(directory, tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestRefusal, match="unsafe"):
        Tokenizer.load(tmp_path).apply_chat_template(list(MESSAGES))


def test_end_of_sequence_ids_are_the_union_of_what_the_files_name(directory, tmp_path):
    assert eos_token_ids(directory) == (0, 2, 7)
    make_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(tmp_path) == (0, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: missing"),
        ("tokenizer.json", "{}", "tokenizer.json: can't be read as a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: can't be read as JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: holds a JSON list, an object is needed"),
        ("chat_template.jinja", "{% if %}", "the chat template can't be compiled"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, message):
    file = make_tokenizer(tmp_path) / name
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_text(content)
    with pytest.raises(CheckpointRefusal, match=message) as refused:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_a_template_chat_is_refused(tmp_path):
    make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestRefusal, match="the checkpoint has no chat template"):
        Tokenizer.load(tmp_path).apply_chat_template(MESSAGES)


@given(data=st.data())
def test_pieces_join_to_the_whole_text_and_never_hold_half_a_character(tokenizer, data):
    encoded, arbitrary = st.text(max_size=6).map(tokenizer.encode), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)
    ids = list(chain.from_iterable(data.draw(st.lists(encoded | arbitrary, max_size=5))))
    detokenizer, text, rest = Detokenizer(tokenizer), "", ids
    while rest:
        size = data.draw(st.integers(1, 3))
        text += detokenizer.push(rest[:size])
        rest = rest[size:]
        assert not text.endswith("\ufffd")
    assert text + detokenizer.finish() == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_at_once(tokenizer):
    ids = tokenizer.encode("a😀b")
    assert len(ids) == 6
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.push(ids[1:3]) == ""
    assert detokenizer.finish() == "\ufffd"


@settings(max_examples=500)
@example(text="abb", stops=["abb", "b"], data=None)
@example(text="abb", stops=["bb", "abb"], data=None)
@given(
    text=st.text(alphabet="ab", max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_stop_strings_cut_the_same_however_the_text_comes(text, stops, data):
    ends = [(end, start, text[start:end]) for end in range(len(text) + 1) for start in range(end)]
    first = min(((end, start) for end, start, piece in ends if piece in stops), default=None)
    stopper, out, rest = StopStrings(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest))) if data else len(rest)
        piece, matched = stopper.push(rest[:size])
        out, rest = out + piece, rest[size:]
        if matched is not None:
            assert first is not None
            end, start = first
            assert (out, matched) == (text[:start], text[start:end])
            return
        # What is given out can't be taken back.
        assert first is None or len(out) <= first[1]
    assert first is None
    assert out + stopper.finish() == text
