"""A request as it is sent to one gateway after another."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence

from pdserve.client.request import GenerateOptions, Prompt, build_request, metadata_of, timeout_of
from pdserve.core.errors import DeadlineExceeded
from pdserve.pb import inference_pb2 as pb


class Ask:
    """What every gateway is asked for. `InvalidRequest` names the first wrong field. With ``several`` gateways the
    request gets an id and, if it is sampled, a seed, so that another gateway can go on with it, token for token."""

    def __init__(self, prompt: Prompt, options: GenerateOptions, several: bool) -> None:
        self._request = build_request(prompt, options)
        self._timeout_s = timeout_of(options)
        self._ends_s: float | None = None
        self.metadata = metadata_of(options)
        if several:
            self._request.request_id = self._request.request_id or f"req-{uuid.uuid4().hex}"
            if self._request.sampling.temperature > 0 and not self._request.sampling.HasField("seed"):
                self._request.sampling.seed = random.getrandbits(63)

    def message(self, token_ids: Sequence[int]) -> pb.GenerateRequest:
        """The request of a client that has these tokens already."""
        if not token_ids:
            return self._request
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(self._request)
        resumed.resume_token_ids.extend(token_ids)
        return resumed

    def connect_timeout_s(self, most_s: float) -> float:
        """How long a connection may take, which is ``most_s`` or less. `DeadlineExceeded` if no time is left."""
        left_s = self._timeout_s if self._ends_s is None else self.timeout_s()
        return min(most_s, left_s or most_s)

    def timeout_s(self) -> float | None:
        """The time that is left, counted from the first call; None without a deadline. `DeadlineExceeded` if it has
        passed."""
        if self._timeout_s is None:
            return None
        now_s = time.monotonic()
        if self._ends_s is None:
            self._ends_s = now_s + self._timeout_s
        if now_s >= self._ends_s:
            raise DeadlineExceeded("the request's deadline passed; raise it or reduce the load")
        return self._ends_s - now_s
