"""A tokenizer and a model small enough to follow by hand, for the self-tests of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch

from reference.engine.kv import KVCache
from reference.kernels.attention import AttentionBatch, paged_attention

VOCAB_SIZE = 300
PADDED_VOCAB = 320
CHAT_TEMPLATE = (
    "{%- if messages[0].role == 'developer' %}{{ raise_exception('no developer role') }}{% endif %}\n"
    # A block's line and its indentation must vanish: templates are written for trim_blocks and lstrip_blocks.
    "  {% for message in messages %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "  {%- if loop.first and shout %}{{ {'é': 1} | tojson }}{% continue %}{% endif %}\n"
    "  {% endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(directory: Path) -> Path:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens and write a checkpoint's tokenizer files."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat", "the hat of the cat that sat there then"] * 8, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"eos_token_id": [0, 7]},
        "config.json": {"eos_token_id": 0},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


class CountingModel:
    """Continues token `t` with `t + 1`, cyclically: its largest logit is there, the next ones fall off by 1 a token.

    Padding columns are larger than any other, so that whoever counts them is wrong at once.
    """

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        return input_ids.float().unsqueeze(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        expected = (hidden.long() + 1) % VOCAB_SIZE
        behind = (torch.arange(VOCAB_SIZE) - expected) % VOCAB_SIZE
        padding = torch.full((hidden.shape[0], PADDED_VOCAB - VOCAB_SIZE), 99.0)
        return torch.cat([-behind.float(), padding], dim=1)


class AttentionModel:
    """Two attention layers over the KV pool, seeded; the same weights wherever it is made."""

    heads, kv_heads, head_dim, layers = 4, 2, 8, 2

    def __init__(self, scale: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

        hidden = self.heads * self.head_dim
        self.embedding = weight(PADDED_VOCAB, hidden) * 3
        self.position = weight(512, hidden)
        self.q = [weight(hidden, hidden) for _ in range(self.layers)]
        self.kv = [weight(2 * self.kv_heads * self.head_dim, hidden) for _ in range(self.layers)]
        self.calls = 0

    def make_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a pool of this model's shape."""
        return KVCache.allocate(self.layers, num_blocks, block_size, self.kv_heads, self.head_dim, torch.float32)

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        self.calls += 1
        hidden = self.embedding[input_ids] + self.position[positions]
        for layer in range(self.layers):
            q = (hidden @ self.q[layer].T).view(-1, self.heads, self.head_dim)
            k, v = (hidden @ self.kv[layer].T).view(-1, 2, self.kv_heads, self.head_dim).unbind(1)
            kv_cache.write(layer, k, v, attention)
            attended = paged_attention(q, kv_cache.k[layer], kv_cache.v[layer], attention, self.head_dim**-0.5)
            hidden = torch.nn.functional.layer_norm(hidden + attended.flatten(1), hidden.shape[-1:])
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embedding.T

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits of a whole sequence, `[len(ids), VOCAB_SIZE]`, by dense attention and no pool."""
        hidden = self.embedding[ids] + self.position[: len(ids)]
        for layer in range(self.layers):
            q = (hidden @ self.q[layer].T).view(-1, self.heads, self.head_dim).transpose(0, 1)
            k, v = (hidden @ self.kv[layer].T).view(-1, 2, self.kv_heads, self.head_dim).permute(1, 2, 0, 3)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            attended = attended.transpose(0, 1).flatten(1)
            hidden = torch.nn.functional.layer_norm(hidden + attended, hidden.shape[-1:])
        return self.compute_logits(hidden)[:, :VOCAB_SIZE]
