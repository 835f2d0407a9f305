"""A small, plain transformer language model. Needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..scaling import scale_rule
from ..torch import attention

_FAR = 16  # all distances beyond it count as the same


@dataclass(frozen=True)
class Shape:
    """What the model is made of.

    rule:    the scale rule; d_model, for the rule that needs it, is heads·d_k
    d_k:     width of a head's queries and keys; the model's own width does not depend on it, so
             that models differ in nothing else
    norm:    where LayerNorm is: "pre", "post", "sandwich" (both) or "none"; "parallel" is one
             before both parts, which then work side by side; "rms" is RMSNorm before each, with
             rotary positions and a gated MLP, as in Llama; "palm" is "parallel" with rotary
             positions and one head of keys and values for all queries, as in PaLM; "alibi" is "pre"
             with scores that fall with the distance, each head at a rate of its own, as in BLOOM;
             "swin" has LayerNorm at the end of each part, inside the residual, as in Swin v2;
             "cait" is "pre" with a learned factor on every channel of a part, 0.1 at first, as in
             CaiT and DINOv2; "deepnet" is "post" with a residual that counts (2·depth)^¼ times, as
             in DeepNet; "t5" is RMSNorm before each part, and a learned bias on the scores for each
             head and distance, as in T5; "rezero" has no norm, and a learned factor on every part,
             0 at first, as in ReZero
    weights: initial weights of queries and keys: "unit" (their entries then have variance 1, as
             claim 2 assumes), "linear" (nn.Linear's own) or "small" (normal, 0.02, as in GPT-2)
    qk_norm: RMSNorm with a learned weight over queries and over keys
    softcap: c·tanh(score/c)
    factor:  on the scale that the rule gives
    dropout: of what each part adds to the residual
    causal:  a position sees only what came before
    """

    rule: str = "sqrt_dk"
    d_k: int = 64
    depth: int = 2
    heads: int = 2
    width: int = 32
    norm: str = "pre"
    weights: str = "unit"
    qk_norm: bool = False
    softcap: float | None = None
    factor: float = 1.0
    dropout: float = 0.0
    causal: bool = True


class Attention(nn.Module):
    """Self-attention; queries and keys are (batch, heads, length, d_k)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        rule = scale_rule(shape.rule)
        self.scale = shape.factor * rule(shape.d_k, shape.heads * shape.d_k)
        shared = shape.heads if shape.norm == "palm" else 1  # by so many heads of queries
        inner = shape.heads * shape.d_k
        self.query = _linear(shape.width, inner, shape.weights)
        self.key = _linear(shape.width, inner // shared, shape.weights)
        self.value = _linear(shape.width, shape.width // shared, "unit")
        self.out = _linear(shape.width, shape.width, "unit")
        self.norms = nn.ModuleList(nn.RMSNorm(shape.d_k) for _ in range(2 * shape.qk_norm))
        self.bias = nn.Embedding(2 * _FAR + 1, shape.heads) if shape.norm == "t5" else None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        d_k, d_v = self.shape.d_k, self.shape.width // self.shape.heads
        query, key, value = (
            project(x).unflatten(-1, (-1, width)).transpose(1, 2)
            for project, width in ((self.query, d_k), (self.key, d_k), (self.value, d_v))
        )
        for norm_query, norm_key in [self.norms] if self.norms else []:
            query, key = norm_query(query), norm_key(key)
        if self.shape.norm in ("rms", "palm"):
            query, key = rotated(query), rotated(key)
        attended: Tensor = attention(
            *(query, key, value),
            mask=self._bias(*query.shape[1:3]),
            causal=self.shape.causal,
            scale=self.scale,
            softcap=self.shape.softcap,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return out

    def _bias(self, heads: int, length: int) -> Tensor | None:
        """What the architecture adds to the scores."""
        if self.bias is not None:
            places = torch.arange(length)
            apart = (places - places[:, None]).clamp(-_FAR, _FAR) + _FAR
            bias: Tensor = self.bias(apart).movedim(-1, 0)
            return bias
        return distances(heads, length) if self.shape.norm == "alibi" else None

    @torch.no_grad()
    def clip(self, largest: Tensor, limit: float) -> None:
        """QK-clip: shrink the queries and keys of heads whose largest score exceeds the limit."""
        factor = (limit / largest.clamp(min=limit)).sqrt().repeat_interleave(self.shape.d_k)
        for projection in (self.query, self.key):
            projection.weight *= factor[:, None]


def _linear(width: int, to: int, weights: str) -> nn.Linear:
    linear = nn.Linear(width, to, bias=False)
    if weights != "linear":
        nn.init.normal_(linear.weight, std=0.02 if weights == "small" else width**-0.5)
    return linear


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: pairs of entries, turned by an angle that grows with the position."""
    length, d_k = x.shape[-2:]
    rates = 10_000.0 ** (-torch.arange(0, d_k, 2) / d_k)
    angles = torch.arange(length)[:, None] * rates
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def distances(heads: int, length: int) -> Tensor:
    """(heads, length, length): what ALiBi takes from the scores, from rate 1/2 down to 1/256."""
    rates = 2.0 ** -torch.linspace(1, 8, heads)
    places = torch.arange(length)
    return -rates[:, None, None] * (places[:, None] - places).abs()


class GatedMLP(nn.Module):
    """An MLP, one half of which decides how much of the other gets through."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) → the same."""
        gate, value = self.up(x).chunk(2, -1)
        out: Tensor = self.down(nn.functional.silu(gate) * value)
        return out


class Block(nn.Module):
    """Attention and an MLP, each around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = shape.norm
        self.attention = Attention(shape)
        gated = shape.norm == "rms"
        self.mlp: nn.Module = (
            GatedMLP(shape.width)
            if gated
            else nn.Sequential(
                nn.Linear(shape.width, 2 * shape.width),
                nn.ReLU(),
                nn.Linear(2 * shape.width, shape.width),
            )
        )
        norm = {"rms": nn.RMSNorm, "t5": nn.RMSNorm, "rezero": nn.Identity}.get(
            shape.norm, nn.LayerNorm
        )
        self.norms = nn.ModuleList(norm(shape.width) for _ in range(2))
        self.after = nn.ModuleList(
            nn.LayerNorm(shape.width) for _ in range(2 * (shape.norm == "sandwich"))
        )
        first = {"cait": torch.full((shape.width,), 0.1), "rezero": torch.zeros(1)}.get(shape.norm)
        self.factors = nn.ParameterList(
            nn.Parameter(first.clone()) for _ in range(2) if first is not None
        )
        self.residual = (2 * shape.depth) ** 0.25 if shape.norm == "deepnet" else 1.0
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same."""
        if self.norm in ("parallel", "palm"):
            normed = self.norms[0](x)
            both: Tensor = x + self.drop(self.attention(normed)) + self.drop(self.mlp(normed))
            return both
        for place, (norm, part) in enumerate(
            zip(self.norms, (self.attention, self.mlp), strict=True)
        ):
            if self.norm == "sandwich":
                x = x + self.drop(self.after[place](part(norm(x))))
            elif self.norm == "swin":
                x = x + self.drop(norm(part(x)))
            elif self.norm in ("cait", "rezero"):
                x = x + self.drop(self.factors[place] * part(norm(x)))
            elif self.norm in ("pre", "rms", "alibi", "t5"):
                x = x + self.drop(part(norm(x)))
            else:
                x = self.residual * x + self.drop(part(x))
                x = norm(x) if self.norm in ("post", "deepnet") else x
        return x


class LanguageModel(nn.Module):
    """Predicts the next word: (batch, length) word numbers → (batch, length, words) logits."""

    def __init__(self, shape: Shape, words: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, shape.width)
        self.positions = nn.Embedding(length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.Identity() if shape.norm == "none" else nn.LayerNorm(shape.width)
        self.out = nn.Linear(shape.width, words, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits."""
        x = self.words(text) + self.positions(torch.arange(text.shape[-1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.out(self.norm(x))
        return logits
