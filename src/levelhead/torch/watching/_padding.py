"""nn.TransformerEncoder in eval mode packs a padded batch, and leaves zeros where the padding was.

It does not pack while a function mode is on: the zeros are put there all the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

_ENCODE = nn.TransformerEncoder.forward.__code__
QUESTION = "is_nested"  # asked when all but a few reasons not to pack are ruled out


def keep_zeros() -> None:
    """If an encoder asks that would pack now, let its last layer fill zeros into the padding."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # of other modes
        frame = frame.f_back
    if frame is None or frame.f_code is not _ENCODE:
        return
    given = frame.f_locals
    encoder, padding = given["self"], given["src_key_padding_mask"]
    learns = torch.is_grad_enabled() and any(
        x.requires_grad for x in (given["src"], *encoder.layers[0].parameters())
    )
    if given["mask"] is not None or torch.is_autocast_enabled() or learns:
        return

    def fill(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        hook.remove()
        ours = kwargs.get("src_key_padding_mask") is padding  # else that call has failed
        return output.masked_fill(padding.ne(0)[..., None], 0) if ours else None

    hook = encoder.layers[-1].register_forward_hook(fill, with_kwargs=True)
