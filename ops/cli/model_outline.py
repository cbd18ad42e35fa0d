"""What `pdserve model-info` prints of models that pdserve does not serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.cli.options import stdout_console

if TYPE_CHECKING:
    from checkpoints.outline import ModelOutline

_DEFAULT_CONTEXT = 4096


def outline_facts(
    name: str, outline: ModelOutline, dtype: str, sizes_gb: tuple[float, ...], context: int | None
) -> dict[str, Any]:
    """The facts of ``--json``. ``context`` defaults to the model's, or to 4096 if it has no limit."""
    from dataclasses import asdict

    from ops import model_memory

    context = context or outline.max_position_embeddings or _DEFAULT_CONTEXT
    return {
        "model": name,
        "served": False,
        "dtype": dtype,
        "checkpoint_dtype": outline.dtype,
        **{key: value for key, value in asdict(outline).items() if key not in ("dtype", "num_parameters")},
        "parameters": outline.num_parameters,
        "weight_bytes": outline.weight_bytes(dtype),
        "kv_bytes_per_token": outline.kv_bytes_per_token(dtype),
        "state_bytes_per_request": outline.request_bytes(dtype, 0),
        "context": context,
        "kv_bytes_context": outline.request_bytes(dtype, context),
        "fits": [asdict(model_memory.fit_outline(outline, dtype, int(gb * 1e9), context)) for gb in sizes_gb],
    }


def show_outline(facts: dict[str, Any]) -> None:
    """Print ``facts``."""
    from checkpoints.families import FAMILIES
    from ops.waterfall.bars import human_bytes
    from pdserve.core.request import counted_requests

    console = stdout_console()
    console.print(f"[bold]{facts['model']}[/] · {facts['architecture']} · {facts['num_layers']} layers")
    console.print(
        f"[bold]not served[/]: pdserve counts its sizes, but cannot run it; it runs {', '.join(FAMILIES)}",
        soft_wrap=True,
    )
    about = "" if facts["exact"] else " (about: counted like a Llama of this shape)"
    state = facts["state_bytes_per_request"]
    console.print(
        f"attention    {facts['attention']}\n"
        f"parameters   {facts['parameters']:,}{about}\n"
        f"weights      {human_bytes(facts['weight_bytes'])} in {facts['dtype']}\n"
        f"KV cache     {human_bytes(facts['kv_bytes_per_token'])} a token"
        + (f", and a state of {human_bytes(state)} a request" if state else "")
        + f"; {human_bytes(facts['kv_bytes_context'])} for a context of {facts['context']}\n",
        soft_wrap=True,
    )
    for fit in facts["fits"]:
        fits = (
            f"{counted_requests(fit['requests'])} of {facts['context']} tokens beside the weights"
            if fit["requests"]
            else f"too small; {fit['devices']} such devices would hold the weights and one request"
        )
        console.print(f"in {human_bytes(fit['memory_bytes'])}: {fits}", soft_wrap=True)
