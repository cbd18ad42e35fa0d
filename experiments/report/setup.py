"""The set-up that every report states: machine, service, method, versions."""

from __future__ import annotations

from experiments.run_folder import RunData


def setup_of(run: RunData, method: str) -> list[tuple[str, str]]:
    """The rows of a report's set-up. ``method`` says in a sentence how was measured."""
    machine, service = run.environment.get("machine", {}), run.environment.get("service") or {}
    rows = [("machine", f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {machine.get('system', '')}")]
    if service:
        workers = service.get("workers", [])
        rows.append(("service", f"{service.get('model', '?')} in {service.get('dtype', '?')}, {len(workers)} workers"))
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    return [*rows, ("method", method), ("versions", packages)]
