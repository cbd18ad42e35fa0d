"""What every report says about where its run took place."""

from __future__ import annotations

from experiments.run_folder import RunData


def setup_of(run: RunData, method: str) -> list[tuple[str, str]]:
    """Machine, service, ``method`` (how it was measured, in words) and versions, from ``env.json``."""
    machine, service = run.environment.get("machine", {}), run.environment.get("service") or {}
    workers = service.get("workers", [])
    return [
        ("machine", f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {machine.get('system', '')}"),
        ("service", f"{service.get('model', '?')} in {service.get('dtype', '?')}, {len(workers)} workers"),
        ("method", method),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())),
    ]
