"""A stack of attention layers at initialisation, and what each of them does. Needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# How a layer with input x uses its attention a.
ARCHITECTURES = {
    "bare": "x → a(x)",
    "residual": "x → x + a(x)",
    "post-norm": "x → norm(x + a(x))",
    "pre-norm": "x → x + a(norm(x))",
    "pre-norm and MLP": "as pre-norm, each followed by x → x + mlp(norm(x))",
}
PARAMETERS = ("W_q", "W_k", "W_v", "W_o")


def stack_layers(
    architecture: str, scale: float, depth: int, *, d_k: int, heads: int, length: int, seed: int
) -> list[dict[str, Any]]:
    """Per layer: the health of its attention, how similar its outputs are, its gradients' norms.

    Weights and inputs have unit variance (weights divided by √d_model), so that scores start as
    claim 2 assumes. They depend only on the seed, so that scales and architectures can be
    compared. The loss is random and linear. All in float64, because gradients span many powers of
    ten.
    """
    import torch  # noqa: PLC0415 - an extra

    from ..torch import attention  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    d_model = heads * d_k
    mlp = architecture == "pre-norm and MLP"

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    def norm(x: Tensor) -> Tensor:
        normed: Tensor = torch.nn.functional.layer_norm(x, (d_model,))
        return normed

    def split(x: Tensor) -> Tensor:
        return x.view(length, heads, d_k).transpose(0, 1)

    x = draw(length, d_model)
    readout = draw(length, d_model)
    layers: list[dict[str, Any]] = []
    weights: list[dict[str, Tensor]] = []
    for layer in range(1, depth + 1):
        w = {name: (draw(d_model, d_model) / d_model**0.5) for name in PARAMETERS}
        up, down = (draw(d_model, 4 * d_model), draw(4 * d_model, d_model)) if mlp else (x, x)
        weights.append({name: weight.requires_grad_() for name, weight in w.items()})

        y = norm(x) if architecture.startswith("pre-norm") else x
        query, key, value = (split(y @ w[name]) for name in PARAMETERS[:3])
        result = attention(query, key, value, scale=scale, return_health=True)
        attended = result.output.transpose(0, 1).flatten(1) @ w["W_o"]
        x = attended if architecture == "bare" else x + attended
        if architecture == "post-norm":
            x = norm(x)
        if mlp:
            hidden = torch.nn.functional.gelu(norm(x) @ up / d_model**0.5)
            x = x + hidden @ down / (4 * d_model) ** 0.5
        health = result.health
        layers.append(
            {
                "layer": layer,
                "score_std": float(health.score_var.mean()) ** 0.5,
                "entropy_ratio": float(health.entropy_ratio.mean()),
                "share_of_keys": float(health.effective_keys.mean()) / length,
                "similarity": _similarity(x.detach()),
            }
        )
    if architecture.startswith("pre-norm"):
        x = norm(x)
    ((x * readout).sum() / length**0.5).backward()
    for row, w in zip(layers, weights, strict=True):
        row |= {
            name: float(weight.grad.norm()) for name, weight in w.items() if weight.grad is not None
        }
    return layers


def _similarity(x: Tensor) -> float:
    """Mean cosine between the vectors of two different positions."""
    unit = x / x.norm(dim=-1, keepdim=True)
    count = len(unit)
    return float((unit @ unit.T).sum() - count) / (count * (count - 1))
