"""Examines the servers of other engines that a configuration names as workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx2

from checkpoints.source import resolve_model
from external_engines.adapter import Description, difference
from external_engines.server import Adapters, adapters_of, client_of, describe
from ops.doctor.report import DoctorReport, Finding, fail, ok, warn
from pdserve.core.config import PdserveConfig
from pdserve.core.errors import ModelError, PdserveError
from pdserve.core.worker import Role

_START = "start it as docs/vllm.md or docs/sglang.md says"


def examine_servers(config: PdserveConfig) -> DoctorReport:
    """Ask each server what it is, and whether the servers can hand KV over to each other."""
    findings: list[Finding] = []
    try:
        resolve_model(config.model.path, served=False)
    except ModelError as error:
        findings.append(fail("model", "the service", str(error), "name the folder that the servers were started with"))
    found: dict[Role, list[tuple[str, Description]]] = {role: [] for role in Role}
    for role, urls in config.cluster.urls.items():
        for number, url in enumerate(urls):
            name = f"{role}-{number} at {url}"
            try:
                description = asyncio.run(_described(url, role, adapters_of(config.worker.connector)))
            except (httpx2.HTTPError, PdserveError) as error:
                what = str(error) or type(error).__name__
                findings.append(fail("server", name, what, f"{_START}, or correct its URL"))
                continue
            found[role].append((name, description))
            findings += _alone(name, description)
    findings += _together(found)
    return DoctorReport(config, "servers", findings=findings)


async def _described(url: str, role: Role, adapters: Adapters) -> Description:
    async with client_of(url) as http:
        _, description = await describe(http, role, adapters)
        return description


def _alone(name: str, description: Description) -> Iterator[Finding]:
    blocks = f"{description.num_blocks} blocks of {description.block_size} tokens"
    yield ok("server", name, f"{description.kind} {description.version}, {description.model}, {blocks}")
    if description.hands_off is False:
        what = "it was not started to hand KV over, and serves requests alone"
        yield warn("server", name, what, f"{_START}, unless that is what you want")
    elif description.hands_off is None:
        what = "it shows no metrics of a KV connector that is known here, so it may hand no KV over"
        yield warn("server", name, what, f"{_START}, with --kv-transfer-config")


def _together(found: dict[Role, list[tuple[str, Description]]]) -> Iterator[Finding]:
    for prefill, mine in found[Role.PREFILL]:
        for decode, theirs in found[Role.DECODE]:
            if differs := difference(dict(mine.in_common), dict(theirs.in_common)):
                remedy = "start both with the same version, model and options"
                yield fail("server", f"{prefill} → {decode}", f"they cannot hand KV over: {differs}", remedy)
