"""The decoder layer as GPUs run it: one product for gate and up, and Triton kernels for what lies between products."""

from __future__ import annotations

import torch

from engine.kernels.cuda_attention import CUDAStep
from engine.kernels.triton_layer import rms_norm, rotate_and_write, silu_times
from engine.model.attention import AttentionStep
from engine.model.decoder import DecoderLayer, LayerForm
from engine.model.kv_pool import LayerKV
from engine.model.linear import PlainLinear
from engine.model.weights import LayerWeights


class CUDALayer(DecoderLayer):
    """One layer, ready to run with `cuda_decoder_layer`."""

    def __init__(
        self, weights: LayerWeights, heads: int, kv_heads: int, head_dim: int, window: int | None, eps: float
    ) -> None:
        super().__init__(weights, heads, kv_heads, head_dim, window, eps)
        self.sum_out = PlainLinear(weights.out, weights.out_bias)
        self.gate_up = PlainLinear(weights.gate_up, weights.gate_up_bias)
        self.sum_down = PlainLinear(weights.down, weights.down_bias)


def cuda_decoder_layer(
    x: torch.Tensor,
    layer: DecoderLayer,
    angles: tuple[torch.Tensor, torch.Tensor],
    kv: LayerKV,
    attention: AttentionStep,
    wanted: torch.Tensor | None = None,
    wanted_attention: AttentionStep | None = None,
) -> torch.Tensor:
    """`engine.model.decoder.decoder_layer` of a `CUDALayer` whose steps are `CUDAStep`. The residual stream is summed
    in the products themselves: ``x`` is overwritten, and returned if all rows are asked for."""
    if not isinstance(layer, CUDALayer) or not isinstance(attention, CUDAStep):
        raise TypeError(f"this form runs no {type(layer).__name__} with a {type(attention).__name__}")
    qkv = layer.qkv(rms_norm(x, layer.input_norm.weight, layer.eps)).view(x.shape[0], -1, layer.head_dim)
    query = rotate_and_write(qkv, *angles, layer.qk_norm, layer.eps, attention.slots, kv.k, kv.v)
    seen: AttentionStep = attention
    if wanted is not None and wanted_attention is not None:
        seen, query, x = wanted_attention, query[wanted], x[wanted]
        if not x.shape[0]:
            return x
    layer.sum_out.add_to(x, seen.attend(query, kv, layer.window, layer.head_dim**-0.5))
    normed = rms_norm(x, layer.post_norm.weight, layer.eps)
    layer.sum_down.add_to(x, silu_times(layer.gate_up(normed)))
    return x


CUDA_FORM = LayerForm(CUDALayer, cuda_decoder_layer, spread=False)
