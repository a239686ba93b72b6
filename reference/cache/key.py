"""The key: what a daemon and an engine must agree on, derived from what the bytes are."""

from __future__ import annotations

from reference.weights.plan import POST_PROCESSING, hash_canonical_json


def derive_key(checkpoint: str, layout_hash: str) -> str:
    """Return `wk1:` + 32 hex digits from a checkpoint's fingerprint and a rank's layout hash."""
    document = {"checkpoint": checkpoint, "layout": layout_hash, "post_processing": POST_PROCESSING}
    return "wk1:" + hash_canonical_json(document)
