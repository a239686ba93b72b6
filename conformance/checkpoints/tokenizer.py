"""A small, real, byte-level BPE tokenizer, trained on the text beside this file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
BYTES = 256


def train(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most `vocab_size` tokens, the same at each call.

    Raises ValueError where `vocab_size` has no room for all bytes and the special tokens.
    """
    least = BYTES + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size}: a byte-level tokenizer needs at least {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((HERE / "corpus.txt").read_text("utf-8").splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=(HERE / "chat_template.jinja").read_text("utf-8"),
        clean_up_tokenization_spaces=False,
    )
