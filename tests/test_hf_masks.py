"""The masks that transformers carries from the model to its attention layers."""

import copy

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import levelhead.hf
from levelhead.hf._attention import attention_forward
from levelhead.hf._bands import band
from levelhead.hf._masks import Mask, Visibility, attention_mask

levelhead.hf.register()
LOWEST = torch.finfo(torch.float32).min
BATCH = 3


class Layer(torch.nn.Module):
    """What attention_forward asks of a model's layer."""

    is_causal = True


def first_is_visible(batch, head, query, key):
    return key == 0


PACKED = packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 20] * BATCH))
BANDS = {
    "causal": (causal_mask_function, (None, 0)),
    "bidirectional": (bidirectional_mask_function, (None, None)),
    "window": (sliding_window_causal_mask_function(4), (3, 0)),
    "window both ways": (sliding_window_bidirectional_mask_function(2), (2, 2)),
    "two windows": (
        and_masks(sliding_window_causal_mask_function(4), sliding_window_causal_mask_function(3)),
        (2, 0),
    ),
    "chunks": (chunked_causal_mask_function(4, torch.tensor([0, 1, 2])), None),
    "packed": (and_masks(causal_mask_function, PACKED), None),
    "union": (or_masks(causal_mask_function, first_is_visible), None),
    "someone's own": (first_is_visible, None),
}
# q_length, kv_length, q_offset, kv_offset: a prompt, decoding, a second prompt after a cache, a
# static cache half full, a window's cache that has moved on
GEOMETRIES = [(7, 7, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (3, 12, 4, 0), (2, 5, 10, 7)]
PADDINGS = {
    "none": None,
    "right": lambda seen: torch.arange(seen) < torch.tensor([[2], [seen], [seen - 1]]),
    "left": lambda seen: torch.arange(seen) >= torch.tensor([[2], [0], [1]]),
    "holes": lambda seen: torch.arange(seen) % 3 != torch.tensor([[1], [0], [2]]),
}


@pytest.mark.parametrize("pattern", BANDS)
def test_bands_are_read_from_mask_functions(pattern):
    function, expected = BANDS[pattern]
    assert band(function) == expected


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pattern", BANDS)
def test_values_are_those_of_the_eager_mask(pattern, padding):
    for rows, keys, q_offset, kv_offset in GEOMETRIES:
        seen = q_offset + rows  # the 2-D mask covers what has been seen, not a static cache
        given = {
            "batch_size": BATCH,
            "q_length": rows,
            "kv_length": keys,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": BANDS[pattern][0],
            "attention_mask": PADDINGS[padding] and PADDINGS[padding](seen),
        }
        mask = attention_mask(**given)
        expected = eager_mask(**given)
        assert isinstance(mask, Mask)
        assert mask.shape == expected.shape
        assert mask.dtype is expected.dtype
        assert isinstance(mask.content, Visibility)  # nobody has asked for values
        if BANDS[pattern][1] is None:
            assert mask.content.visible.shape == expected.shape
        elif padding in ("none", "right"):
            assert mask.content.visible is None
        assert torch.equal(mask + 0, expected)
        assert torch.equal(mask.content, expected)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pattern", ["causal", "window", "window both ways", "chunks"])
def test_attention_is_that_of_the_dense_mask(pattern, padding):
    generator = torch.Generator().manual_seed(0)
    for rows, keys, q_offset, kv_offset in GEOMETRIES:
        query = torch.randn(BATCH, 4, rows, 8, generator=generator)
        key, value = torch.randn(2, BATCH, 2, keys, 8, generator=generator)
        mask = attention_mask(
            BATCH,
            rows,
            keys,
            torch.tensor(q_offset),  # as static caches give it
            kv_offset,
            BANDS[pattern][0],
            PADDINGS[padding] and PADDINGS[padding](q_offset + rows),
        )
        got, _ = attention_forward(Layer(), query, key, value, mask)
        assert isinstance(mask.content, Visibility)
        visible = mask == 0
        scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        expected = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


def causal(rows=5):
    return attention_mask(BATCH, rows, rows)


def test_looking_at_a_mask_makes_no_values():
    mask = causal()
    assert len(mask.shape) == mask.ndim == mask.dim() == 4
    assert mask.size(-1) == 5
    assert mask.device.type == "cpu"
    assert len(mask) == BATCH
    assert mask.is_floating_point()
    assert not mask.requires_grad
    assert isinstance(mask.content, Visibility)


def test_every_way_to_the_values_shows_the_same():
    expected = torch.zeros(BATCH, 1, 5, 5).masked_fill(~torch.ones(5, 5).tril().bool(), LOWEST)
    for look in (
        lambda mask: mask.contiguous(),
        lambda mask: mask.clone(),
        lambda mask: mask.to(torch.float64).float(),
        lambda mask: torch.cat([mask[:1], mask[1:]]),
        lambda mask: torch.where(mask == 0, 0.0, mask),
        lambda mask: torch.from_numpy(mask.numpy().copy()),
        lambda mask: torch.tensor(mask.tolist()),
        copy.deepcopy,
    ):
        values = look(causal())
        assert type(values) is torch.Tensor  # for torch.compile, which generate() makes masks for
        assert torch.equal(values, expected)
    assert "nan" not in repr(causal())


def test_what_is_written_to_a_mask_counts():
    query, key, value = torch.randn(3, BATCH, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = causal()
    plain, _ = attention_forward(Layer(), query, key, value, mask)
    mask[:, :, -1, :4] = LOWEST  # the last query sees itself only
    got, _ = attention_forward(Layer(), query, key, value, mask)
    assert torch.equal(got[:, -1], value[:, :, -1])
    assert not torch.equal(got, plain)
    torch.testing.assert_close(got[:, :-1], plain[:, :-1])


def test_a_mask_of_another_size_raises():
    query, key, value = torch.randn(3, BATCH, 2, 6, 4)
    with pytest.raises(ValueError, match="attention_mask: expected 6 queries and 6 keys in Layer"):
        attention_forward(Layer(), query, key, value, causal(5))


def test_another_device_gets_plain_values():
    mask = AttentionMaskInterface()["levelhead"](BATCH, 5, 5, device="meta")
    assert type(mask) is torch.Tensor
    assert mask.device.type == "meta"
