"""The tokens of a request, as policies that know prefix caches see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.core.prefix_digests import PrefixDigests
from router.prefix_index import PrefixIndex


class Prompt:
    """Looks the tokens of one request up in a `PrefixIndex`. Each block is hashed once, when the lookup comes to it."""

    def __init__(self, index: PrefixIndex, salt: str, block_size: int, token_ids: Sequence[int]) -> None:
        self._index = index
        self._token_ids = token_ids
        self._block_size = block_size
        self._digests = PrefixDigests(salt, block_size)
        self._version = -1
        self._cached: Mapping[str, int] = {}

    def cached(self) -> Mapping[str, int]:
        """How many of its first tokens each worker has in its prefix cache, without workers that have none."""
        if self._version != self._index.version:
            self._version = self._index.version
            blocks = self._index.cached(self._digests.hashes(self._token_ids))
            self._cached = {worker_id: count * self._block_size for worker_id, count in blocks.items()}
        return self._cached
