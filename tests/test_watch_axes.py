"""Attention by hand in other layouts: which axis is that of the heads, which that of the keys."""

import pytest
import torch
from einops import einsum as named_einsum
from einops import rearrange
from torch import nn
from watch_support import Oracle, assert_same_gradients, assert_same_health, randn

import levelhead.torch

B, H, L, D = 3, 4, 6, 8
SCALE = D**-0.5


def soft(scores, dim=-1):
    return (scores * SCALE).softmax(dim)


def rows_and_heads(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = soft(torch.einsum("bihd,bjhd->bihj", q, k))
    return torch.einsum("bihj,bjhd->bhid", weights, v)


def heads_last(q, k, v):
    weights = soft(torch.einsum("bhid,bhjd->bijh", q, k), dim=2)
    return torch.einsum("bijh,bhjd->bhid", weights, v)


def keys_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = soft(torch.einsum("bihd, bjhd -> bjhi", q, k), dim=1)
    return torch.einsum("bjhi,bjhd->bhid", weights, v)


def heads_first(q, k, v):
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    return (soft(torch.matmul(q, k.transpose(2, 3))) @ v).transpose(0, 1)


def keys_transposed_before(q, k, v):
    k = k.permute(0, 1, 3, 2).contiguous()
    return soft(torch.matmul(q, k), dim=3) @ v


def keys_by_queries(q, k, v):
    weights = soft(k @ q.mT, dim=-2)
    return (v.mT @ weights).mT


def values_first(q, k, v):
    q, k, v = (x.flatten(0, 1).mT for x in (q, k, v))
    weights = soft(torch.bmm(q.mT, k))
    return torch.bmm(v, weights.permute(0, 2, 1)).mT.view(B, H, L, D)


def three_dimensions(q, k, v):
    q, k, v = (x.reshape(B * H, L, D) for x in (q, k, v))
    weights = soft(torch.einsum("nid,njd->nij", q, k))
    return torch.einsum("nij,njd->nid", weights, v).reshape(B, H, L, D)


def dots(q, k, v):
    return torch.einsum("...ij,...jd->...id", [soft(torch.einsum("...id,...jd->...ij", q, k)), v])


def names(q, k, v):
    weights = soft(named_einsum(q, k, "b h i d, b h j d -> b h i j"))
    return named_einsum(weights, v, "b h i j, b h j d -> b h i d")


def split_queries(q, k, v):
    """Queries in rows and columns, as images have them."""
    scores = torch.einsum("bhxyd,bhjd->bhxyj", q.unflatten(2, (2, 3)), k)
    return torch.einsum("bhxyj,bhjd->bhxyd", soft(scores), v).flatten(2, 3)


def in_rows_and_columns(q, k, v):
    """A bias by rows and by columns, as in SAM."""
    scores = (q @ k.mT).view(B, H, 2, 3, 2, 3) + torch.zeros(2, 3, 1, 1) + torch.zeros(1, 1, 2, 3)
    return soft(scores.view(B, H, L, L)) @ v


GIVEN = [
    rows_and_heads, heads_last, keys_first, heads_first, keys_transposed_before, keys_by_queries,
    values_first, three_dimensions, dots, names, split_queries, in_rows_and_columns,
]  # fmt: skip


class CallOptions(nn.Module):
    """Queries, keys and values come from elsewhere; the module knows how many heads there are."""

    num_heads = H

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, *given):
        return self.way(*given)


def watched(model, inputs):
    """The watch, the calls, and the output with the gradients of the inputs, as unwatched."""
    runs, calls = [], []
    for seen in (None, levelhead.torch.watch(model)):
        given = [x.clone().requires_grad_() for x in inputs]
        if seen is None:
            output = model(*given)
            (output * randn(*output.shape, seed=5)).sum().backward()
        else:
            with seen, levelhead.torch.listen(calls.append):
                output = model(*given)
                (output * randn(*output.shape, seed=5)).sum().backward()
        runs.append([output, *(x.grad for x in given)])
    for plain, other in zip(*runs, strict=True):
        assert torch.equal(plain, other)
    return seen, calls, runs[0]


def agree(seen, output, inputs, **options):
    """Statistics and output are those of an explicit softmax of the same queries and keys."""
    truth = Oracle()
    given = [x.clone().requires_grad_() for x in inputs]
    explicit = truth(*given, **options)
    (explicit * randn(*explicit.shape, seed=5)).sum().backward()
    torch.testing.assert_close(output.reshape(explicit.shape), explicit, rtol=1e-5, atol=2e-5)
    assert_same_health(seen.health, truth.health(), but=("distance",))
    assert_same_gradients(seen.gradients, truth.gradients())


@pytest.mark.parametrize("way", GIVEN, ids=lambda way: way.__name__)
def test_layouts(way):
    inputs = [2 * randn(B, H, L, D, seed=seed) for seed in range(3)]
    seen, (call,), (output, *_) = watched(CallOptions(way), inputs)
    assert seen.calls == 1 and not seen.not_understood
    rows = 3 if way is split_queries else L
    assert call.shape == (B * L // rows, H, rows, L) and call.dk == D
    assert call.scale == pytest.approx(SCALE)
    agree(seen, output, inputs)
    for entry in range(B) if rows == L else ():
        for head in range(H):
            scores = inputs[0][entry, head] @ inputs[1][entry, head].mT * SCALE
            torch.testing.assert_close(
                torch.from_numpy(call.scores(entry, head)).float(), scores, rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(
                torch.from_numpy(call.weights(entry, head)).float(), scores.softmax(-1),
                rtol=1e-4, atol=1e-6,
            )  # fmt: skip


GROUPS = 2


def grouped(q, k, v):
    scores = torch.einsum("bkgid,bkjd->bkgij", q.unflatten(1, (GROUPS, -1)), k[:, :GROUPS])
    return torch.einsum("bkgij,bkjd->bkgid", soft(scores), v[:, :GROUPS]).flatten(1, 2)


def repeated(q, k, v):
    """Keys of a group of heads expanded and folded, queries by a way that cannot be followed."""
    k, v = (x[:, :GROUPS, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (k, v))
    return soft(q @ k.mT) @ v


def one_key_head(q, k, v):
    scores = torch.einsum("bhid,bjd->bhij", q, k[:, 0])
    return torch.einsum("bhij,bjd->bhid", soft(scores), v[:, 0])


def one_key_head_after_rows(q, k, v):
    """As in multi-head latent attention."""
    scores = torch.einsum("bihd,bjd->bihj", q.transpose(1, 2), k[:, 0])
    return torch.einsum("bihj,bjd->bhid", soft(scores), v[:, 0])


def one_key_head_broadcast(q, k, v):
    return soft(q @ k[:, :1].mT) @ v[:, :1]


def heads_among_queries(q, k, v):
    """All heads are rows of one product."""
    scores = torch.bmm(q.reshape(B, H * L, D), k[:, 0].mT).view(B, H, L, L)
    return torch.bmm(soft(scores).view(B, H * L, L), v[:, 0]).view(q.shape)


SHARED = {grouped: GROUPS, repeated: GROUPS, one_key_head: 1, one_key_head_after_rows: 1,
          one_key_head_broadcast: 1, heads_among_queries: 1}  # fmt: skip


@pytest.mark.parametrize("way", SHARED, ids=lambda way: way.__name__)
@pytest.mark.parametrize("projected", [True, False])
def test_heads_that_share_keys(way, projected):
    """Projected: the heads are known by the features that were split, and by nothing else."""
    inputs = [2 * randn(B, H, L, D, seed=seed) for seed in range(3)]
    model = CallOptions(way)
    if projected:
        model.num_heads = None
        inputs = [x.transpose(1, 2).flatten(2) for x in inputs]
        model.way = lambda *x: way(*(x.view(B, L, H, D).transpose(1, 2) for x in x))
    seen, (call,), (output, *_) = watched(model, inputs)
    assert call.shape == (B, H, L, L)
    if projected:
        inputs = [x.view(B, L, H, D).transpose(1, 2) for x in inputs]
    q, k, v = inputs
    k, v = (x[:, : SHARED[way]].repeat_interleave(H // SHARED[way], 1) for x in (k, v))
    agree(seen, output, (q, k, v))


def test_one_head_at_a_time():
    """A loop over heads is a call for each, of one head, however many batch entries there are."""
    inputs = [2 * randn(H, L, H * D, seed=seed) for seed in range(3)]  # as many as heads

    def loop(*given):
        q, k, v = (x.view(H, L, H, D) for x in given)
        heads = [soft(q[:, :, h] @ k[:, :, h].mT) @ v[:, :, h] for h in range(H)]
        return torch.stack(heads, 2)

    seen, calls, _ = watched(CallOptions(loop), inputs)
    assert [call.shape for call in calls] == [(H, 1, L, L)] * H
    assert seen.health[""].shape == (1,) and seen.health[""].rows[0] == H * H * L


@pytest.mark.parametrize("product", [
    lambda q, k: torch.einsum("nd,md->nm", q, k), lambda q, k: q @ k.T,
    lambda q, k: torch.mm(q, k.t()), lambda q, k: torch.addmm(torch.zeros(L, L), q, k.T),
], ids=["einsum", "matmul", "mm", "addmm"])  # fmt: skip
def test_one_matrix_at_a_time(product):
    inputs = [2 * randn(B, H, L, D, seed=seed) for seed in range(3)]

    def loop(q, k, v):
        rows = [[soft(product(q[b, h], k[b, h]), 1) @ v[b, h] for h in range(H)] for b in range(B)]
        return torch.stack([torch.stack(row) for row in rows])

    seen, calls, (output, *_) = watched(CallOptions(loop), inputs)
    assert {call.shape for call in calls} == {(1, 1, L, L)} and len(calls) == B * H
    flat = [x.flatten(0, 1)[:, None] for x in inputs]
    truth = Oracle()
    torch.testing.assert_close(truth(*flat).view(output.shape), output, rtol=1e-5, atol=2e-5)
    assert_same_health(seen.health, {"": truth.health()[0]})


@pytest.mark.parametrize("shape", [(1, H, L, D), (B, 1, L, D), (1, 1, L, D), (0, H, L, D)], ids=str)
def test_sizes_of_one_and_none(shape):
    x = randn(*shape)
    calls = []
    with levelhead.torch.listen(calls.append):
        soft(x @ x.mT) @ x
        soft(x[:, :, :1] @ x.mT) @ x
        soft(x @ x[:, :, :1].mT) @ x[:, :, :1]
    sizes = [(L, L), (1, L), (L, 1)]
    assert [call.shape for call in calls] == [(*shape[:2], *size) for size in sizes]


# ---------------------------------------------------------------- known by the projections alone


N = 4  # batch entries, heads, tokens, dimensions of a head: their number says nothing


def four(x):
    return x.view(N, N, N, N)


def p_usual(q, k, v):
    q, k, v = (four(x).transpose(1, 2) for x in (q, k, v))
    return (q @ k.mT).softmax(-1) @ v


def p_from_one_dimension(q, k, v):
    q, k, v = (x.flatten(1).view(N, N, N, N).permute(2, 0, 1, 3) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)


def p_heads_first(q, k, v):
    q, k, v = (rearrange(x, "b n (h d) -> h b n d", h=N) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)


def p_rows_and_heads(q, k, v):
    q, k, v = map(four, (q, k, v))
    weights = torch.einsum("bihd,bjhd->bihj", q, k).softmax(-1)
    return torch.einsum("bihj,bjhd->bhid", weights, v)


def p_folded(q, k, v):
    q, k, v = (rearrange(x, "b n (h d) -> (b h) n d", h=N) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(N, N, N, N)


def p_folded_and_doubled(q, k, v):
    """A folded batch twice, as guided diffusion has it."""
    q, k, v = (rearrange(x, "b n (h d) -> (b h) n d", h=N) for x in (q, k, v))
    q, k, v = torch.cat([q, q]), k.repeat(2, 1, 1), torch.cat([v, v])
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(2, N, N, N, N)[1]


def p_folded_heads_first(q, k, v):
    q, k, v = (rearrange(x, "b n (h d) -> (h b) n d", h=N) for x in (q, k, v))
    weights = torch.bmm(q, k.mT).softmax(-1)
    return torch.bmm(weights, v).view(N, N, N, N).transpose(0, 1)


def p_sequence_first(q, k, v):
    """As in fairseq: (tokens, batch, features), folded in one view."""
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
    q, k, v = (x.view(N, N * N, N).transpose(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(N, N, N, N)


def p_channels_first(q, k, v):
    q, k, v = (x.mT.contiguous().view(N, N, N, N) for x in (q, k, v))  # b h d n
    weights = torch.einsum("bhdi,bhdj->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhdj->bhid", weights, v)


def p_turned(q, k, v):
    """Rotary embeddings by complex numbers, by zeros here."""
    q, k = (torch.view_as_complex(four(x).unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    q, k = (torch.view_as_real(x * (1 + 0j)).flatten(3).permute(2, 0, 1, 3) for x in (q, k))
    v = four(v).permute(2, 0, 1, 3)
    return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)


def p_turned_by_halves(q, k, v):
    def turn(x):
        x = 0.5 * rearrange(four(x), "b n h d -> h b n d")
        turned = torch.cat((-x[..., N // 2 :], x[..., : N // 2]), -1)
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        zeros = torch.zeros(N)
        return turned * zeros + x * (zeros + 1) + pairs * zeros

    v = four(v).permute(2, 0, 1, 3)
    return ((turn(q) @ turn(k).mT).softmax(-1) @ v).transpose(0, 1)


def p_joint(q, k, v):
    both = torch.stack((q, k, v), 2).view(N, N, 3, N, N)
    q, k, v = both.permute(2, 3, 0, 1, 4)
    return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)


def p_cached(q, k, v):
    """Keys and values joined from those of earlier tokens and new ones."""
    q, k, v = (rearrange(x, "b n (h d) -> h b n d", h=N) for x in (q, k, v))
    k, v = (torch.cat([x[..., :2, :], x[..., 2:, :]], -2) for x in (k, v))
    return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)


def p_normalised(q, k, v):
    q, k, v = (rearrange(x, "b n (h d) -> h b n d", h=N) for x in (q, k, v))
    q, k = (nn.functional.layer_norm(7 * x, (N,)) * 1.5 for x in (q, k))
    return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1)


def p_blocks(q, k, v):
    """Blocks of the sequence after the heads: five dimensions."""
    q, k, v = (rearrange(x, "b (l i) (h d) -> b h l i d", h=N, l=2) for x in (q, k, v))
    weights = torch.einsum("bhlid,bhljd->bhlij", q, k).softmax(-1)
    return torch.einsum("bhlij,bhljd->bhlid", weights, v).flatten(2, 3)


def p_blocks_folded(q, k, v):
    """As Longformer has them: batch and heads in one dimension, then the blocks."""
    q, k, v = (rearrange(x, "b (l i) (h d) -> (b h) l i d", h=N, l=2) for x in (q, k, v))
    weights = torch.einsum("blid,bljd->blij", q, k).softmax(-1)
    return torch.einsum("blij,bljd->blid", weights, v).reshape(N, N, N, N)


PROJECTED = [
    p_usual, p_from_one_dimension, p_heads_first, p_rows_and_heads, p_folded, p_folded_and_doubled,
    p_folded_heads_first, p_sequence_first, p_channels_first, p_turned, p_turned_by_halves,
    p_joint, p_cached, p_normalised, p_blocks, p_blocks_folded,
]  # fmt: skip


class Projected(nn.Module):
    """The number of heads is nowhere, and all dimensions are of one size."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.q, self.k, self.v = (nn.Linear(N * N, N * N) for _ in range(3))

    def forward(self, x):
        return self.way(self.q(x), self.k(x), self.v(x))


@pytest.mark.parametrize("way", PROJECTED, ids=lambda way: way.__name__[2:])
def test_projections_tell_the_heads(way):
    torch.manual_seed(0)
    model, x = Projected(way), 3 * randn(N, N, N * N)
    seen, (call,), (output, *_) = watched(model, [x])
    rows = 2 if way in (p_blocks, p_blocks_folded) else N
    batch = N * N // rows * (1 + (way is p_folded_and_doubled))
    assert call.shape == (batch, N, rows, rows) and call.dk == N
    with torch.no_grad():
        q, k, v = (four(layer(x)).transpose(1, 2) for layer in (model.q, model.k, model.v))
    if way is p_normalised:
        q, k = (nn.functional.layer_norm(7 * x, (N,)) * 1.5 for x in (q, k))
    if way is p_turned_by_halves:
        q, k = q / 2, k / 2
    if rows == 2:
        q, k, v = (rearrange(x, "b h (l i) d -> (b l) h i d", l=2) for x in (q, k, v))
        output = rearrange(output, "b h (l i) d -> (b l) h i d", l=2)
    truth = Oracle()
    torch.testing.assert_close(truth(q, k, v, scale=1.0), output, rtol=1e-5, atol=2e-5)
    (expected,) = truth.health().values()
    if batch > N * N // rows:
        expected = expected.merge(expected)
    assert_same_health(seen.health, {"": expected}, but=("distance",))
    scale = {p_normalised: 2.25, p_turned_by_halves: 0.25}.get(way, 1)
    assert call.scale == pytest.approx(scale)
