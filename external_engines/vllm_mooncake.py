"""vLLM with its MooncakeConnector: both servers get the request at once, and decode finds prefill by its bootstrap port
and a name that pdserve gives the transfer.

Servers are started with ``--kv-transfer-config '{"kv_connector": "MooncakeConnector", "kv_role": "kv_both",
"kv_load_failure_policy": "fail"}'``. Written after the sources of vLLM 0.32, whose connector needs GPUs, and tested
with recorded servers alone."""

from __future__ import annotations

from typing import Any

import httpx2

from external_engines.adapter import Description, HandOff
from external_engines.vllm import VLLM, body_of
from pdserve.core.address import join_address
from pdserve.core.errors import PdserveError
from pdserve.core.request import Request

_DEFAULT_PORT = 8998


class MooncakeVLLM(VLLM):
    """See `external_engines.adapter.Adapter`. ``kv_address`` is that of the server's bootstrap port (default: vLLM's,
    at the host of its URL)."""

    transport = "mooncake"
    abilities = VLLM.abilities._replace(hand_off="prefill sends it; both have the request at once", proof="none")

    async def describe(self, http: httpx2.AsyncClient) -> Description | None:
        """See `external_engines.adapter.Adapter`. Mooncake's connector shows no metrics, but a bootstrap port if it can
        prefill. Its KV address is followed by the engine's id, which decode needs, too."""
        description = await super().describe(http)
        if description is None:
            return None
        at = self._kv_address or join_address(http.base_url.host, _DEFAULT_PORT)
        try:
            async with httpx2.AsyncClient(timeout=http.timeout, trust_env=False) as bootstrap:
                engines = (await bootstrap.get(f"http://{at}/query")).raise_for_status().json()
        except httpx2.ConnectError:
            return description._replace(hands_off=False)  # it only decodes, as far as can be seen
        try:
            (engine,) = engines.values()
            return description._replace(hands_off=True, kv_address=f"{at}/{engine['engine_id']}")
        except (AttributeError, KeyError, TypeError, ValueError):
            raise PdserveError(f"its bootstrap port at {at} does not tell one engine: {str(engines)[:200]}") from None

    def meeting(self, attempt_id: str, kv_address: str) -> HandOff | None:
        """See `external_engines.adapter.Adapter`."""
        at, _, engine_id = kv_address.partition("/")
        return {"transfer_id": attempt_id, "remote_bootstrap_addr": f"http://{at}", "remote_engine_id": engine_id}

    def prefill(self, request: Request, model: str, meeting: HandOff | None) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        assert meeting is not None, "there always is one"
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": meeting["transfer_id"]}
        return body_of(request, model) | {"stream": False, "max_tokens": 1, "kv_transfer_params": params}

    def decode(self, request: Request, model: str, hand_off: HandOff) -> dict[str, Any]:
        """See `external_engines.adapter.Adapter`."""
        params = {"do_remote_decode": False, "do_remote_prefill": True, **hand_off}
        return body_of(request, model) | {"stream": True, "kv_transfer_params": params}
