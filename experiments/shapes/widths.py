"""Shapes of one model with KV caches of different widths: a Llama of 12 heads of 48 dimensions and 30 layers, whose KV
heads are varied. All have random weights, so that nothing but the shape matters.

``mla`` has the cache size of multi-head latent attention, not its computation: DeepSeek-V2 caches 4.5 times the head
dimension per token and layer (216 values here); two KV heads cache 192."""

from __future__ import annotations

from pathlib import Path

WIDTHS = {"mha": "12 KV heads", "gqa": "4 KV heads", "mla": "2 KV heads: the size of an MLA cache", "mqa": "1 KV head"}


def model_path(width: str) -> str:
    """``model.path`` of the shape ``width``, one of `WIDTHS`."""
    return f"dummy:{Path(__file__).parent / width / 'config.json'}"
