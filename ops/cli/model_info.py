"""`pdserve model-info`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.options import JsonOption, plain_table, print_json, print_note, stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from checkpoints.outline import ModelOutline
    from checkpoints.shape import ModelShape
    from runtime.dtypes import NativeDtypes

_DEFAULT_MEMORY_GB = (16.0, 24.0, 80.0)
_DEFAULT_WINDOW = 4096
_DEFAULT_CONTEXT = 4096


def model_info(
    model: Annotated[
        str, typer.Argument(help="folder, config.json, org/name on the hub, 'tiny', 'dummy:135m' or 'dummy:8b'")
    ],
    dtype: Annotated[
        str, typer.Option(help="auto (a type that the device computes natively), float32, bfloat16 or float16")
    ] = "auto",
    device: Annotated[str, typer.Option(help="device for --dtype auto: auto (GPUs if any), cpu or cuda")] = ("auto"),
    memory: Annotated[float | None, typer.Option(help="GB (10^9 bytes) of one device (default: 16, 24 and 80)")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of one request (default: the model's context length)")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="devices over which the model is split; adds what each of them holds")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Count a model's parameters, the size of its KV cache (as it is, and with MHA, GQA, MQA, MLA or a window), and
    what fits into memory. A config.json is enough, and models that pdserve does not serve are counted as well."""
    from checkpoints.outline import is_served, outline_from_hf
    from checkpoints.source import config_of, resolve_model, tokenizer_note
    from gateway.chat_template import load_chat_template
    from pdserve.core.errors import InvalidRequest
    from pdserve.core.kv_layout import DTYPE_BYTES
    from runtime.dtypes import choose_dtype

    if dtype not in ("auto", *DTYPE_BYTES):
        raise InvalidRequest(f"dtype: {dtype!r} is none of auto, {', '.join(DTYPE_BYTES)}")
    if memory is not None and not 0 < memory < 1e9:
        raise InvalidRequest(f"memory: {memory} is not a positive number of GB")
    sizes_gb = _DEFAULT_MEMORY_GB if memory is None else (memory,)
    found = config_of(model, lambda stage: typer.echo(stage, err=True))
    if found is not None and not is_served(found[0]):
        outline = outline_from_hf(found[0], str(found[1]))
        choice = choose_dtype(dtype, outline.dtype, {"this host": _devices(device)})
        facts = _outline_facts(model, outline, choice.dtype, sizes_gb, context)
        print_json(facts) if as_json else _show_outline(facts)
        return
    alone = found is not None and not any(found[1].parent.glob("*.safetensors"))  # the config without weights
    source = resolve_model(f"dummy:{found[1]}" if found is not None and (alone or model.endswith(".json")) else model)
    context = context or source.shape.max_position_embeddings
    window = None if source.shape.windows else min(_DEFAULT_WINDOW, max(1, context // 4))
    choice = choose_dtype(dtype, source.shape.dtype, {"this host": _devices(device)})
    facts = _facts(model if alone else source.name, source.shape, choice.dtype, sizes_gb, context, window)
    if tensor_parallel > 1:
        facts |= _ranks(source.shape, tensor_parallel, choice.dtype, sizes_gb, context)
    facts["notes"] = [note for note in (choice.note, tokenizer_note(source.folder)) if note]
    if source.folder is not None:
        if not source.shape.eos_token_ids:
            facts["notes"].append("no eos_token_id: outputs end by their length alone, and JSON and regex are refused")
        if load_chat_template(source.folder) is None:
            facts["notes"].append("no chat template: chats are refused, unless model.chat_template names one")
    if as_json:
        print_json(facts)
    else:
        _show(facts)


def _ranks(shape: ModelShape, count: int, dtype: str, sizes_gb: tuple[float, ...], context: int) -> dict[str, Any]:
    """What each rank of a tensor-parallel worker holds, and what fits onto the device of the largest. ConfigError if
    there cannot be so many."""
    from engine.model.share import Share
    from ops import model_memory
    from pdserve.core.config import CPU_TOKEN_BUDGET

    shares = [Share(shape, rank, count).shape for rank in range(count)]
    largest = max(shares, key=lambda share: share.num_parameters)
    step_bytes = model_memory.activation_bytes(largest, dtype, CPU_TOKEN_BUDGET)
    context_bytes = context * largest.kv_bytes_per_token(dtype)
    return {
        "ranks": [
            {
                "heads": share.num_heads,
                "kv_heads": share.num_kv_heads,
                "parameters": share.num_parameters,
                "weight_bytes": share.weight_bytes(dtype),
                "kv_bytes_per_token": share.kv_bytes_per_token(dtype),
            }
            for share in shares
        ],
        "fits": [
            model_memory.fit(largest, dtype, int(gb * 1e9), context, context_bytes, step_bytes) for gb in sizes_gb
        ],
    }  # fmt: skip


def _devices(kind: str) -> list[NativeDtypes]:
    from pathlib import Path

    from pdserve.core.errors import InvalidRequest
    from runtime.dtypes import native_dtypes

    if kind not in ("auto", "cpu", "cuda"):
        raise InvalidRequest(f"device: {kind!r} is none of auto, cpu, cuda")
    # Looks for GPUs only where there may be any, because that imports torch.
    if kind == "cuda" or (kind == "auto" and any(Path("/dev").glob("nvidia[0-9]*"))):
        gpus = native_dtypes("cuda")
        if kind == "cuda" and not gpus:
            raise InvalidRequest("device: torch sees no GPU on this host; set --dtype instead")
        if gpus:
            return gpus
    return native_dtypes("cpu")


def _facts(
    name: str, shape: ModelShape, dtype: str, sizes_gb: tuple[float, ...], context: int, window: int | None
) -> dict[str, Any]:
    from dataclasses import asdict

    from ops import model_memory
    from pdserve.core.config import CPU_TOKEN_BUDGET

    latent, rope = model_memory.mla_dims(shape)
    context_bytes = context * shape.kv_bytes_per_token(dtype)
    step_bytes = model_memory.activation_bytes(shape, dtype, CPU_TOKEN_BUDGET)
    windows = shape.layer_windows if window is None else (window,) * shape.num_layers
    return {
        "model": name,
        "dtype": dtype,
        "checkpoint_dtype": shape.dtype,
        "attention": shape.attention,
        "shape": asdict(shape),
        "parameters": shape.num_parameters,
        "active_parameters": shape.active_parameters,
        "weight_bytes": shape.weight_bytes(dtype),
        "weight_bytes_on_gpus": shape.weight_bytes(dtype, keep_fp8=True),
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype),
        "kv_variants": model_memory.kv_variants(shape, dtype),
        "mla_assumed": {"latent_dim": latent, "rope_dim": rope},
        "context": context,
        "kv_bytes_context": context_bytes,
        "window": max(w for w in windows if w is not None),
        "windowed_layers": sum(w is not None for w in windows),
        "kv_bytes_context_windowed": model_memory.window_kv_bytes(shape, dtype, context, windows),
        "activation_tokens": CPU_TOKEN_BUDGET,
        "activation_bytes": step_bytes,
        "fits": [
            model_memory.fit(shape, dtype, int(gb * 1e9), context, context_bytes, step_bytes) for gb in sizes_gb
        ],
        "prefill_flops_per_token": model_memory.prefill_flops_per_token(shape, context),
        "phi_gbps_per_tflops": model_memory.phi_gbps_per_tflops(shape, dtype, context),
    }  # fmt: skip


def _show(facts: dict[str, Any]) -> None:
    from ops.waterfall.bars import human_bytes

    console, shape, per_token = stdout_console(), facts["shape"], facts["kv_bytes_per_token"]
    console.print(
        f"[bold]{facts['model']}[/] · {shape['architecture']} · {shape['num_layers']} layers · hidden "
        f"{shape['hidden_size']} · MLP {shape['intermediate_size']} · {shape['num_heads']} heads, "
        f"{shape['num_kv_heads']} KV heads of {shape['head_dim']} "
        f"({facts['attention']}) · vocabulary {shape['vocab_size']}"
    )
    for line in _peculiarities(shape):
        console.print(line)
    stored = "" if facts["checkpoint_dtype"] == facts["dtype"] else f" (stored in {facts['checkpoint_dtype']})"
    active = ""
    if facts["active_parameters"] != facts["parameters"]:
        active = f", of them {facts['active_parameters']:,} per token"
    eight_bits = ""
    if facts["weight_bytes_on_gpus"] < facts["weight_bytes"]:
        eight_bits = f", {human_bytes(facts['weight_bytes_on_gpus'])} on GPUs that multiply FP8"
    console.print(
        f"parameters   {facts['parameters']:,}{active}\n"
        f"weights      {human_bytes(facts['weight_bytes'])} in {facts['dtype']}{stored}{eight_bits}\n"
        f"activations  {human_bytes(facts['activation_bytes'])} at the peak of a step of "
        f"{facts['activation_tokens']} tokens\n"
        f"KV cache     {human_bytes(per_token)} a token, {human_bytes(facts['kv_bytes_context'])} for a context of "
        f"{facts['context']}\n"
    )
    table = plain_table(("attention",), ("bytes/token", "x", "context"), "the KV cache with other kinds of attention")
    table.add_column("what")
    for variant in facts["kv_variants"]:
        size = variant["bytes_per_token"]
        same = size == per_token and variant["name"] != "MLA"
        table.add_row(
            variant["name"], f"{size:,}", f"{size / per_token:.2f}", human_bytes(size * facts["context"]),
            variant["what"] + (" ← this model" if same else ""), style="bold" if same else "",
        )  # fmt: skip
    windowed = facts["kv_bytes_context_windowed"]
    table.add_row(
        "window", f"{per_token:,}", f"{windowed / facts['kv_bytes_context']:.2f}", human_bytes(windowed),
        f"if only the last {facts['window']} tokens were kept in {facts['windowed_layers']} of "
        f"{shape['num_layers']} layers",
    )  # fmt: skip
    console.print(table)
    console.print()
    if "ranks" in facts:
        _show_ranks(console, facts["ranks"])
    _show_fits(console, facts, "weights and activations")
    console.print(
        f"\nprefill {facts['prefill_flops_per_token'] / 1e9:.3f} GFLOP a token (prompt of {facts['context']})\n"
        f"Φ = KV bytes / prefill time = {facts['phi_gbps_per_tflops']:.4f} Gbit/s per TFLOP/s that prefill "
        "achieves: a faster link hides the hand-off",
        soft_wrap=True,
    )
    for note in facts["notes"]:
        print_note(console, note)


def _show_ranks(console: Console, ranks: list[dict[str, Any]]) -> None:
    from ops.waterfall.bars import human_bytes

    columns = ("rank", "heads", "KV heads", "weights", "KV a token")
    table = plain_table((), columns, f"the model over {len(ranks)} devices")
    for number, rank in enumerate(ranks):
        sizes = human_bytes(rank["weight_bytes"]), human_bytes(rank["kv_bytes_per_token"])
        table.add_row(str(number), str(rank["heads"]), str(rank["kv_heads"]), *sizes)
    console.print(table)
    console.print()


def _peculiarities(shape: dict[str, Any]) -> list[str]:
    """What distinguishes the model from a plain Llama, one line each."""
    lines = []
    if shape["experts"] is not None:
        experts = shape["experts"]
        plain = f", in all layers but {len(experts['dense_layers'])}" if experts["dense_layers"] else ""
        lines.append(f"experts      {experts['per_token']} of {experts['count']} per token{plain}")
    names = {"qkv_bias": "queries, keys, values", "out_bias": "attention output", "mlp_bias": "MLP"}
    biases = [name for key, name in names.items() if shape[key]]
    if biases:
        lines.append(f"biases       {' · '.join(biases)}")
    if shape["qk_norm"]:
        heads = "over all heads" if shape["qk_norm_spans_heads"] else "per head"
        lines.append(f"norms        queries and keys, {heads}, before rope")
    windowed = [i for i, window in enumerate(shape["windows"]) if window is not None]
    if windowed:
        widest = max(shape["windows"][i] for i in windowed)
        lines.append(
            f"window       {widest} tokens in {len(windowed)} of {shape['num_layers']} layers; the KV pool keeps all "
            "tokens nevertheless, so sizes and fits below count all of them"
        )
    return lines


def _outline_facts(
    name: str, outline: ModelOutline, dtype: str, sizes_gb: tuple[float, ...], context: int | None
) -> dict[str, Any]:
    """The facts of ``--json``. ``context`` defaults to the model's, or to 4096 if it has no limit."""
    from dataclasses import asdict

    from ops import model_memory

    context = context or outline.max_position_embeddings or _DEFAULT_CONTEXT
    context_bytes = outline.request_bytes(dtype, context)
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
        "kv_bytes_context": context_bytes,
        "fits": [model_memory.fit(outline, dtype, int(gb * 1e9), context, context_bytes) for gb in sizes_gb],
    }


def _show_outline(facts: dict[str, Any]) -> None:
    """Print ``facts``."""
    from checkpoints.families import architectures
    from ops.waterfall.bars import human_bytes

    console = stdout_console()
    console.print(f"[bold]{facts['model']}[/] · {facts['architecture']} · {facts['num_layers']} layers")
    console.print(
        "[bold]not served[/] by pdserve's engine, which runs "
        f"{', '.join(architectures())}; for others set worker.engine: vllm (docs/vllm.md)",
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
    _show_fits(console, facts, "weights")


def _show_fits(console: Console, facts: dict[str, Any], beside: str) -> None:
    from ops.waterfall.bars import human_bytes
    from pdserve.core.request import counted

    for fit in facts["fits"]:
        fits = f"too small for {beside}; {fit['devices']} such devices would hold the weights and one request"
        if fit["kv_bytes"]:
            requests = f"{counted(fit['requests'], 'request')} of {facts['context']}"
            fits = f"{fit['tokens']:,} tokens of KV: {requests}"
        console.print(f"in {human_bytes(fit['memory_bytes'])}: {fits}", soft_wrap=True)
