"""After how many layers of a step the KV that it has computed so far travels, with ``transfer.overlap: layer``."""

from __future__ import annotations

from pdserve.core.kv_layout import KVLayout

WORTH_BYTES = 256 * 2**10
"""Groups of layers smaller than this do not travel on their own: each costs the engine and both workers a message."""


def group_ends(layout: KVLayout, most_groups: int, num_blocks: int) -> tuple[int, ...]:
    """The numbers of layers after which a step that touches ``num_blocks`` blocks tells of them, its last layer left
    out: empty if there is only one group."""
    groups = min(most_groups, layout.num_layers, num_blocks * layout.block_bytes // WORTH_BYTES)
    return tuple(sorted({layout.num_layers * group // groups for group in range(1, groups)}))
