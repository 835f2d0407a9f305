"""Watching models that nobody here wrote: Hugging Face, x-transformers."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from transformers.masking_utils import eager_mask
from watch_support import (
    Oracle,
    assert_same_gradients,
    assert_same_health,
    assert_same_step,
    lively,
    oracle,
    randn,
    train_step,
)

import levelhead.hf
import levelhead.torch

transformers.logging.set_verbosity_error()
levelhead.hf.register()

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = TOKENS | {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
MODELS = {
    "GPT2LMHeadModel": dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, **TOKENS),
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 2},
    "BertForMaskedLM": SMALL,
    "ViTForImageClassification": {
        name: size for name, size in SMALL.items() if name not in (*TOKENS, "vocab_size")
    }
    | {"image_size": 16, "patch_size": 4},
    "T5ForConditionalGeneration": dict(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, decoder_start_token_id=0, dropout_rate=0.0, **TOKENS,
    ),
    "WhisperForConditionalGeneration": dict(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=20, max_target_positions=40, decoder_start_token_id=3, **TOKENS,
    ),
    "Gemma2ForCausalLM": GROUPED | {"attn_logit_softcapping": 2.0},
    "GptOssForCausalLM": GROUPED | {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "BloomForCausalLM": dict(vocab_size=99, hidden_size=32, n_layer=2, n_head=4, **TOKENS),
}  # fmt: skip
NAMES = {
    "GPT2LMHeadModel": ["transformer.h.0.attn", "transformer.h.1.attn"],
    "LlamaForCausalLM": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
    "BertForMaskedLM": [f"bert.encoder.layer.{i}.attention.self" for i in (0, 1)],
    "WhisperForConditionalGeneration": [
        *(f"model.encoder.layers.{i}.self_attn" for i in (0, 1)),
        *(
            f"model.decoder.layers.{i}.{kind}"
            for i in (0, 1)
            for kind in ("self_attn", "encoder_attn")
        ),
    ],
}


@cache
def model_of(name, implementation):
    config = getattr(transformers, name).config_class(**MODELS[name])
    config._attn_implementation = implementation
    return lively(getattr(transformers, name)(config), size=0.2).eval()


def run(model):
    """Logits of two sentences, the first padded at its end."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, 13), generator=generator)
    real = torch.ones_like(ids)
    real[0, -4:] = 0
    given = {"input_ids": ids, "attention_mask": real}
    if type(model).__name__.startswith("ViT"):
        given = {"pixel_values": randn(2, 3, 16, 16)}
    elif type(model).__name__.startswith("T5"):
        given |= {"decoder_input_ids": ids[:, :9]}
    elif type(model).__name__.startswith("Whisper"):
        given = {"input_features": randn(2, 8, 40), "decoder_input_ids": ids}
    logits = model(**given).logits
    return logits if "attention_mask" not in given or logits.shape[1] != 13 else logits[real.bool()]


@cache
def by_oracle(name):
    """Health and gradients of one step, by an attention of our own registered with transformers."""
    truth = Oracle()

    def attend(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None,
               position_bias=None, **_):  # fmt: skip
        if position_bias is not None:
            attention_mask = (
                position_bias if attention_mask is None else attention_mask + position_bias
            )
        output = truth(
            query, key, value, attention_mask, scale=scaling, softcap=softcap, sinks=s_aux,
            name=names[id(module)],
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("oracle", attend)
    transformers.AttentionMaskInterface.register("oracle", eager_mask)
    model = model_of(name, "oracle")
    names = {id(module): name for name, module in model.named_modules()}
    step = train_step(model, run)
    return step, truth.health(), truth.gradients()


CASES = [
    (name, implementation)
    for name in MODELS
    for implementation in ("sdpa", "eager", "levelhead")
    if (name, implementation)
    not in {
        ("Gemma2ForCausalLM", "sdpa"),  # drops the softcap
        ("GptOssForCausalLM", "sdpa"),  # refused by transformers
        ("BloomForCausalLM", "sdpa"),
        ("BloomForCausalLM", "levelhead"),
    }
]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_hugging_face(name, implementation):
    model = model_of(name, implementation)
    plain = train_step(model, run)
    with levelhead.torch.watch(model) as seen:
        watched = train_step(model, run)
    assert_same_step(watched, plain, 1e-4)
    if name in NAMES:
        assert list(seen.health) == NAMES[name]
    if name == "BloomForCausalLM":  # has an attention of its own
        assert list(seen.health) == [f"transformer.h.{i}.self_attention" for i in (0, 1)]
        assert seen.calls == 2 and len(seen.gradients) == 2
        return
    step, health, gradients = by_oracle(name)
    assert_same_step(plain, step, 1e-4)
    but = ("distance",) if name.startswith("T5") else ()  # of cross attention, undefined
    assert_same_health(seen.health, health, 1e-3, 1e-4, but)
    assert_same_gradients(seen.gradients, gradients, 5e-3)
    assert seen.calls == len(health)


def test_training_with_dropout_is_the_same_training():
    """GPT-2 as it comes drops weights: losses step by step, watched and not."""

    def losses(watched):
        torch.manual_seed(0)
        config = transformers.GPT2Config(**MODELS["GPT2LMHeadModel"], attn_implementation="sdpa")
        assert config.attn_pdrop == 0.1
        model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        with levelhead.torch.watch(model, every=2) if watched else nullcontext() as seen:
            for _ in range(5):
                ids = torch.randint(3, 99, (2, 13))  # from the same stream as dropout
                loss = model(input_ids=ids, labels=ids).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found, seen

    plain, _ = losses(False)
    watched, seen = losses(True)
    np.testing.assert_allclose(watched, plain, rtol=1e-5)
    assert seen.calls == 3 * 2 and len(seen.gradients) == 2


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "levelhead"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_generate(name, implementation):
    model = model_of(name, implementation)
    ids = torch.arange(3, 14).expand(2, -1)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": True}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    steps = []
    with levelhead.torch.watch(model, sinks=[steps.append]) as seen:
        watched = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(watched, plain)
    forwards = plain.shape[1] - ids.shape[1]
    assert [record.step for record in steps] == list(range(forwards))
    assert seen.calls == 2 * forwards
    assert list(seen.health) == NAMES[name]
    rows = 2 * (ids.shape[1] + forwards - 1)  # each position once, in both sentences
    assert all((health.rows == rows).all() for health in seen.health.values())
    widest = [int(record.health[NAMES[name][0]].widest_row[0]) for record in steps]
    assert widest == list(range(ids.shape[1], ids.shape[1] + forwards))


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "levelhead"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_face_with_gradient_checkpointing(implementation, reentrant):
    model = model_of("LlamaForCausalLM", implementation)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()  # else transformers does not checkpoint
    try:
        with levelhead.torch.watch(model) as seen:
            watched = train_step(model, run)
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
        model.eval()
    step, health, gradients = by_oracle("LlamaForCausalLM")
    assert_same_step(watched, step, 1e-4)
    assert_same_health(seen.health, health, 1e-3, 1e-4)
    assert_same_gradients(seen.gradients, gradients, 5e-3)
    assert seen.calls == 2


# ---------------------------------------------------------------- x-transformers


X_OPTIONS = [
    {},
    {"attn_kv_heads": 2},
    {"rotary_pos_emb": True},
    {"attn_qk_norm": True},
    {"alibi_pos_bias": True},
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("options", X_OPTIONS, ids=str)
def test_x_transformers(options):
    import x_transformers

    ids = torch.randint(0, 99, (2, 13), generator=torch.Generator().manual_seed(1))
    models = {}
    for flash in (True, False):
        layers = x_transformers.Decoder(
            dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=flash, **options
        )
        models[flash] = x_transformers.TransformerWrapper(
            num_tokens=99, max_seq_len=32, attn_layers=layers
        )
    models[True].load_state_dict(models[False].state_dict())
    with oracle() as truth:
        step = train_step(models[True], lambda m: m(ids))
    names = [f"attn_layers.layers.{place}.1.attend" for place in (0, 2)]
    for model in models.values():
        plain = train_step(model, lambda m: m(ids))
        with levelhead.torch.watch(model) as seen:
            watched = train_step(model, lambda m: m(ids))
        assert_same_step(watched, plain, 1e-4)
        assert_same_step(plain, step, 1e-4)
        assert list(seen.health) == list(seen.gradients) == names
        assert_same_health(seen.health, truth.health(), 1e-3, 1e-4)
        assert_same_gradients(seen.gradients, truth.gradients(), 5e-3)
        assert (seen.health[names[0]].pairs == 2 * 13 * 14 / 2).all()
        assert seen.calls == 2
