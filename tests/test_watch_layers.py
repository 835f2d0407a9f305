"""Hugging Face models with attention of their own making, against the softmaxes in them."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from watch_support import assert_same_step, lively, randn, train_step

import levelhead.torch

transformers.logging.set_verbosity_error()

H = 4
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99}
BERT = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "max_position_embeddings": 70,
}
BART = TOKENS | {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": H,
    "decoder_attention_heads": H,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 0,
}


def ids(length):
    return torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(1))


FIRST_IS_GLOBAL = torch.zeros(2, 32, dtype=torch.long)
FIRST_IS_GLOBAL[:, 0] = 1
ENTITIES = {
    "entity_ids": torch.tensor([[1, 2], [3, 4]]),
    "entity_position_ids": torch.tensor([[[1, 2, -1], [4, -1, -1]]] * 2),
    "attention_mask": torch.ones(2, 13, dtype=torch.long),
}
PARTS = {"attention_mask": torch.ones(2, 13), "token_type_ids": (ids(13) > 50).long()}
# Of each: the options, the inputs, and per call of a layer the axis of the heads in its logits
# (None: folded with the batch). Of the ones that add to their scores, scores are not compared.
MODELS = {
    "LongformerModel": (BERT | {"attention_window": [8, 8]}, {"input_ids": ids(32)}, [2]),
    "LongformerModel, global": (
        BERT | {"attention_window": [8, 8]},
        {"input_ids": ids(32), "global_attention_mask": FIRST_IS_GLOBAL},
        [2, None],
    ),
    "LEDModel": (BART | {"attention_window": 8}, {"input_ids": ids(32)}, [2]),
    "XLNetModel": (
        TOKENS | {"d_model": 32, "n_layer": 3, "n_head": H, "d_inner": 64},
        {"input_ids": ids(13)}, [1],
    ),
    "XLNetModel, segments": (
        TOKENS | {"d_model": 32, "n_layer": 1, "n_head": H, "d_inner": 64},
        {"input_ids": ids(13), **PARTS}, [1],
    ),
    "XGLMModel": (
        TOKENS | {"d_model": 32, "num_layers": 2, "attention_heads": H, "ffn_dim": 64},
        {"input_ids": ids(13)}, [None],
    ),
    "LukeModel": (
        BERT | {"entity_vocab_size": 20, "entity_emb_size": 32, "use_entity_aware_attention": True},
        {"input_ids": ids(13), **ENTITIES}, [1],
    ),
    "BigBirdModel": (
        BERT | {"block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse"},
        {"input_ids": ids(64)}, [1] * 5,
    ),
    "PegasusXModel": (
        BART | {"block_size": 8, "num_global_tokens": 4},
        {"input_ids": ids(32), "decoder_input_ids": ids(5)}, [1, 1],
    ),
    "SqueezeBertModel": (BERT | {"embedding_size": 32}, {"input_ids": ids(13)}, [1]),
}  # fmt: skip


def record(monkeypatch):
    """The logits of all softmaxes over their last dimension, as they come."""
    found, original = [], nn.functional.softmax

    def softmax(logits, *args, **kwargs):
        found.append(logits.detach().clone())
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "softmax", softmax)
    return found


def by_head(logits, axis):
    """(heads, rows, keys)"""
    if axis is None:
        logits, axis = logits.unflatten(0, (-1, H)), 1
    return logits.movedim(axis, 0).flatten(1, -2)


@pytest.mark.parametrize("name", MODELS)
def test_heads_and_statistics_are_those_of_its_softmaxes(name, monkeypatch):
    options, given, axes = MODELS[name]
    kind = getattr(transformers, name.split(",")[0])
    config = kind.config_class(**options)
    config._attn_implementation = "eager"
    model = lively(kind(config), size=0.2).eval()

    def run(model):
        return model(**given).last_hidden_state

    plain = train_step(model, run)
    calls = []
    with levelhead.torch.watch(model) as seen, levelhead.torch.listen(calls.append, model):
        watched = train_step(model, run)
    assert_same_step(watched, plain, 1e-6)
    assert not seen.not_understood
    layers = [layer for layer in seen.health if "decoder" not in layer]
    assert [call.module for call in calls if call.module in layers] == [
        layer for layer in layers for _ in axes
    ]
    assert list(seen.gradients) == list(seen.health)
    softmaxes = record(monkeypatch)
    with torch.no_grad():
        run(model)
    assert len(softmaxes) == seen.calls
    for place, layer in enumerate(layers):
        health = seen.health[layer]
        assert health.shape == (H,)
        low = torch.finfo(torch.float32).min / 2
        heads = [[] for _ in range(H)]
        for logits, axis in zip(softmaxes[place * len(axes) :], axes, strict=False):
            for head, rows in enumerate(by_head(logits, axis)):
                heads[head] += rows.double()
        for head, rows in enumerate(heads):
            shown = [row[row > low] for row in rows]
            weights = [row.softmax(-1) for row in shown]
            assert health.rows[head] == len(rows)
            assert health.pairs[head] == sum(map(len, shown))
            entropy = np.mean([-(p * p.clamp(1e-300).log()).sum().item() for p in weights])
            assert health.entropy[head] == pytest.approx(entropy, rel=1e-4)
            top = np.mean([p.max().item() for p in weights])
            assert health.top_weight[head] == pytest.approx(top, rel=1e-4)
            if not name.startswith("XLNet"):
                largest = max(row.max().item() for row in shown)
                assert health.score_max[head] == pytest.approx(largest, rel=1e-4)


def test_dead_code_is_no_call():
    """SAM 2 computes weights that it does not use before it computes its attention."""
    config = transformers.Sam2HieraDetConfig(
        hidden_size=8, embed_dim_per_stage=[8, 16, 32, 64], image_size=[64, 64]
    )
    config._attn_implementation = "eager"
    model = lively(transformers.Sam2HieraDetModel(config)).eval()
    with levelhead.torch.watch(model) as seen:
        train_step(model, lambda m: m(randn(1, 3, 64, 64)).last_hidden_state)
    assert list(seen.health) == [f"blocks.{block}.attn" for block in range(12)]
    assert seen.calls == 12 and not seen.not_understood and len(seen.gradients) == 12
    heads = [model.get_submodule(layer).num_attention_heads for layer in seen.health]
    assert [health.shape[-1] for health in seen.health.values()] == heads


def test_groups_of_patches_are_not_understood():
    """GroupViT's softmax is over the groups, and weighs patches: not what a head does."""
    config = transformers.GroupViTVisionConfig(
        image_size=32, patch_size=4, hidden_size=32, intermediate_size=64, depths=[1, 1],
        num_hidden_layers=2, num_group_tokens=[8, 0], num_output_groups=[4, 0],
        num_attention_heads=H,
    )  # fmt: skip
    model = transformers.GroupViTVisionModel(config).eval()
    with torch.no_grad(), levelhead.torch.watch(model) as seen:
        model(randn(2, 3, 32, 32))
    (missed,) = seen.not_understood
    assert missed == "vision_model.encoder.stages.0.downsample.assign"
    assert f"not understood in {missed} (1 call)." in seen.summary()
    assert seen.calls == 3
