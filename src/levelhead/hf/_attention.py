"""The attention function that transformers calls: its options, as those of the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.utils.output_capturing import _active_collector

from .. import torch as levelhead_torch
from ._masks import Mask, Visibility

# What models hand to all their layers, and attention may drop: it is in the tensors or the mask
# already, or only kernels for packed sequences on a GPU need it.
HARMLESS = frozenset({
    "position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache",
    "output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch",
    "logits_to_keep", "labels", "input_ids", "inputs_embeds", "token_type_ids",
    "encoder_hidden_states", "encoder_attention_mask", "layer_idx", "query_length",
    "max_length_q", "max_length_k", "seq_idx", "deterministic",
})  # fmt: skip
IGNORED: set[str] = set()  # what the caller of register() told us to drop


def attention_forward(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Output (batch, rows, heads, Dv) and, if asked for, weights (batch, heads, rows, keys)."""
    _refuse_unknown(module, others)
    options = _visibility(module, query, key, attention_mask, is_causal, sliding_window)
    if cu_seq_lens_q is not None:
        packed = _same_sequence(query, key, cu_seq_lens_q, cu_seq_lens_k)
        options["mask"] = _hide(options["mask"], packed)
    if indices is not None:  # (batch, rows, n): the keys that a sparse model has chosen
        chosen = query.new_zeros(*indices.shape[:-1], key.shape[-2], dtype=torch.bool)
        chosen = chosen.scatter_(-1, indices.long(), True)
        options["mask"] = _hide(options["mask"], chosen[:, None])
    if position_bias is not None:
        options["mask"] = _add(options["mask"], position_bias)
    if isinstance(scaling, Tensor):  # perhaps learned: so that its gradient is not lost
        query, scaling = query * scaling, 1.0
    options |= {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    if module.training and dropout:
        options["dropout"] = dropout

    attention = levelhead_torch.attention
    if not (output_attentions or _weights_recorded()):
        output, weights = attention(query, key, value, **options), None
    elif "dropout" in options or _needs_gradient(query, key, options["mask"], s_aux):
        # As eager does: weights with a gradient, after dropout. Unit vectors attended to are them.
        options["seed"] = int(torch.randint(2**63 - 1, ()))
        unit = torch.eye(key.shape[-2], dtype=value.dtype, device=value.device)
        output = attention(query, key, value, **options)
        weights = attention(query, key, unit.expand(*key.shape[:-2], -1, -1), **options)
    else:
        output, _, weights, _ = attention(query, key, value, return_weights=True, **options)
    return output.transpose(1, 2).contiguous(), weights


def _visibility(
    module: Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | Visibility | None,
    is_causal: bool | None,
    sliding_window: int | None,
) -> dict[str, Any]:
    """Who sees whom. A mask says it all, as in eager; without one, the causal flag does."""
    rows, keys = query.shape[-2], key.shape[-2]
    if isinstance(mask, Mask):
        mask = mask.content
    if isinstance(mask, Visibility):
        seen = mask
        if (seen.rows, seen.keys) != (rows, keys):
            raise ValueError(
                f"attention_mask: expected {rows} queries and {keys} keys in "
                f"{type(module).__name__}, got {seen.rows} and {seen.keys}"
            )
        if is_causal is False and seen.band[1] == 0 and rows > 1:
            raise ValueError(
                "is_causal: expected None or True where the model makes a causal mask, got "
                "False; set model.config.is_causal = False, which changes the mask"
            )
        return {
            "mask": seen.visible,
            "window": seen.band,
            "query_offset": seen.offset,
            "key_lengths": seen.lengths,
        }
    if mask is not None:
        decoding = mask.shape == (query.shape[0], 1, 1, keys) and not torch.compiler.is_compiling()
        return {"mask": mask, "key_lengths": _last_visible(mask) if decoding else None}
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if causal and rows > 1:  # aligned as transformers' sdpa is: the first query at the first key
        return {"mask": None, "causal": True, "window": sliding_window, "query_offset": 0}
    if sliding_window is not None and sliding_window < keys:
        raise ValueError(
            f"sliding_window: expected a mask with it in {type(module).__name__}, got "
            f"{sliding_window} without one; pass an attention_mask"
        )
    return {"mask": None}


def _last_visible(mask: Tensor) -> Tensor:
    """(batch,): the keys up to the last visible one; the rest of a static cache costs nothing."""
    shown = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return (shown * torch.arange(1, mask.shape[-1] + 1, device=mask.device)).amax((1, 2, 3))


def _same_sequence(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor | None) -> Tensor:
    """Which pairs lie in one of several sequences packed into a row: (1, 1, rows, keys)."""
    row, column = (
        torch.searchsorted(
            starts.to(x.device, torch.int64).contiguous(),
            torch.arange(x.shape[-2], device=x.device),
            right=True,
        )
        for x, starts in ((query, starts_q), (key, starts_q if starts_k is None else starts_k))
    )
    return (row[:, None] == column)[None, None]


def _hide(mask: Tensor | None, visible: Tensor) -> Tensor:
    if mask is None:
        return visible
    return mask & visible if mask.dtype is torch.bool else mask.where(visible, -torch.inf)


def _add(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return bias.where(mask, -torch.inf) if mask.dtype is torch.bool else mask + bias


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _weights_recorded() -> bool:
    """Whether transformers collects attention weights from the layers that run now.

    Some models do not pass output_attentions down, and only hook their layers.
    """
    compiled = torch.compiler.is_compiling()  # a context variable cannot be read in a graph
    wanted = _active_collector.global_var if compiled else _active_collector.get()
    return wanted is not None and any(name.endswith("attentions") for name in wanted)


def _refuse_unknown(module: Module, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is None or value is False or name in HARMLESS or name in IGNORED:
            continue
        raise ValueError(
            f"{name}: levelhead does not know this option of {type(module).__name__} and will not "
            'ignore it, as it may change attention. Use attn_implementation="eager", or '
            f"levelhead.hf.register(ignore=[{name!r}]) if it changes nothing"
        )
