"""Hugging Face models, tiny and random: Levelhead gives what their own eager attention gives."""

import copy
from functools import cache

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import levelhead.hf
import levelhead.torch
from levelhead import _engine

transformers.logging.set_verbosity_error()
levelhead.hf.register()

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = TOKENS | {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
MODELS = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**GROUPED)),
    "mistral": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=5)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**GROUPED, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **GROUPED,
            head_dim=8,
            sliding_window=5,
            num_local_experts=2,
            num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "bert": (BertForMaskedLM, BertConfig(**SMALL)),
    "vit": (
        ViTForImageClassification,
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        ),
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            decoder_start_token_id=0,
            **TOKENS,
        ),
    ),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig(
            vocab_size=99,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=40,
            decoder_start_token_id=3,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **TOKENS,
        ),
    ),
}
DECODERS = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss")
ATTENTION_LAYERS = dict.fromkeys(MODELS, 2) | {"t5": 6, "whisper": 6}
LENGTH = 13  # of the sentences; longer than the windows
PADDED = 4


@cache
def pair(name):
    """The model twice, in eager and in Levelhead, with the same weights of a lively size."""
    model_class, config = MODELS[name]
    models = []
    for implementation in ("eager", "levelhead"):
        config = copy.deepcopy(config)
        config._attn_implementation = implementation
        models.append(model_class(config).eval())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter, weight in models[0].named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
            if weight.dim() == 1 and not parameter.endswith("bias"):
                weight.add_(1)
    models[1].load_state_dict(models[0].state_dict())
    return models


def sentences(padding):
    ids = torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    if padding == "left":
        real[0, :PADDED] = 0
    elif padding == "right":
        real[0, -PADDED:] = 0
    return {"input_ids": ids, "attention_mask": real}


def inputs(name, padding):
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    given = sentences(padding)
    if name == "t5":
        return given | {"decoder_input_ids": given["input_ids"][:, :7]}
    if name == "whisper":
        return {
            "input_features": torch.randn(2, 8, 40, generator=generator),
            "decoder_input_ids": given["input_ids"],
            "decoder_attention_mask": given["attention_mask"],
        }
    return given


def real_logits(model, given, **options):
    """The logits that mean something: those of tokens that are no padding."""
    logits = model(**given, **options).logits
    real = given.get("decoder_attention_mask", given.get("attention_mask"))
    if "decoder_input_ids" in given and "decoder_attention_mask" not in given:
        real = None
    return logits if real is None else logits[real.bool()]


def relative_error(got, expected):
    got, expected = got.detach(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.fixture
def engine_calls(monkeypatch):
    """How often the compiled engine ran."""
    calls = []
    forward = _engine.forward
    monkeypatch.setattr(_engine, "forward", lambda *a: calls.append(a) or forward(*a))
    return calls


@pytest.fixture
def options(monkeypatch):
    """The options of each call of levelhead.torch.attention."""
    calls = []
    attention = levelhead.torch.attention

    def spy(*tensors, **options):
        calls.append({name: value for name, value in options.items() if value is not None})
        return attention(*tensors, **options)

    monkeypatch.setattr(levelhead.torch, "attention", spy)
    return calls


PADDINGS = [
    (name, padding)
    for name in MODELS
    for padding in (("none",) if name == "vit" else ("none", "left", "right"))
]


@pytest.mark.parametrize(("name", "padding"), PADDINGS)
def test_logits_and_every_gradient_agree_with_eager(name, padding, engine_calls):
    eager, ours = pair(name)
    given = inputs(name, padding)
    expected = real_logits(eager, given)
    assert not engine_calls
    got = real_logits(ours, given)
    assert len(engine_calls) == ATTENTION_LAYERS[name]
    assert relative_error(got, expected) < 3e-6

    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    for model, logits in ((eager, expected), (ours, got)):
        model.zero_grad()
        (logits * pull).sum().backward()
    wanted = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert wanted.keys() == found.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for parameter, gradient in wanted.items():
        # a bias of keys moves all scores alike: its gradient is rounding, so largest has a say
        bound = 2e-5 * float(gradient.abs().max()) + 1e-6 * largest
        assert float((found[parameter] - gradient).abs().max()) <= bound, parameter


OPTIONS_THAT_MATTER = [
    ("mistral", lambda model: setattr_all(model, "sliding_window", 3)),
    ("gemma2", lambda model: setattr_all(model, "attn_logit_softcapping", 1.0)),
    ("gpt_oss", lambda model: [layer.self_attn.sinks.data.add_(3) for layer in model.model.layers]),
    ("t5", lambda model: next(relative_biases(model)).weight.data.mul_(-4)),
]


def setattr_all(model, name, value):
    setattr(model.config, name, value)
    for module in model.modules():
        if hasattr(module, name):
            setattr(module, name, value)


def relative_biases(model):
    return (module for name, module in model.named_modules() if name.endswith("attention_bias"))


@pytest.mark.parametrize(("name", "change"), OPTIONS_THAT_MATTER)
def test_an_option_changes_the_result_and_agreement_follows(name, change):
    given = inputs(name, "none")
    eager, ours = map(copy.deepcopy, pair(name))
    with torch.no_grad():
        before = real_logits(ours, given)
        change(eager)
        change(ours)
        after = real_logits(ours, given)
        assert relative_error(before, after) > 1e-2
        assert relative_error(after, real_logits(eager, given)) < 3e-6


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
def test_generates_the_same_tokens(name, cache_kind, engine_calls):
    eager, ours = pair(name)
    given = inputs(name, "left")
    for extra in ("decoder_input_ids", "decoder_attention_mask"):
        given.pop(extra, None)
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    expected = eager.generate(**given, **options, cache_implementation=cache_kind)
    assert not engine_calls
    got = ours.generate(**given, **options, cache_implementation=cache_kind)
    assert torch.equal(got, expected)
    assert len(engine_calls) >= 9 * 2
    assert len(expected[:, -9:].unique()) > 1  # a model that says one word would prove little


def test_beam_search_reorders_its_cache():
    eager, ours = pair("llama")
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    given = inputs("llama", "left")
    assert torch.equal(ours.generate(**given, **options), eager.generate(**given, **options))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_attention_weights_as_eager_returns_them(name, training):
    eager, ours = pair(name)
    given = inputs(name, "right")
    with torch.set_grad_enabled(training):
        expected = eager(**given, output_attentions=True)
        got = ours(**given, output_attentions=True)
    fields = [field for field in expected if field.endswith("attentions") and expected[field]]
    assert len(fields) == (3 if name in ("t5", "whisper") else 1)
    for field in fields:
        assert len(got[field]) == len(expected[field]) == 2
        for weights, wanted in zip(got[field], expected[field], strict=True):
            assert weights.shape == wanted.shape
            torch.testing.assert_close(weights, wanted, atol=1e-5, rtol=0)
            assert weights.requires_grad == training


def test_generate_returns_weights():
    eager, ours = pair("llama")
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    given = inputs("llama", "none")
    got = ours.generate(**given, **options, output_attentions=True).attentions
    expected = eager.generate(**given, **options, output_attentions=True).attentions
    for step, wanted in zip(got, expected, strict=True):
        for weights, of_eager in zip(step, wanted, strict=True):
            torch.testing.assert_close(weights, of_eager, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_16_bit_is_as_close_to_float32_as_eager_is(name, dtype, engine_calls):
    eager, ours = pair(name)
    given = inputs(name, "left")
    with torch.no_grad():
        truth = real_logits(eager, given)
        of_eager = real_logits(copy.deepcopy(eager).to(dtype), given)
        assert not engine_calls
        got = real_logits(copy.deepcopy(ours).to(dtype), given)
    assert len(engine_calls) == ATTENTION_LAYERS[name]
    assert got.dtype is dtype
    floor = torch.finfo(dtype).eps
    assert relative_error(got.float(), truth) <= 2 * relative_error(of_eager.float(), truth) + floor


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    plain, checkpointed = (copy.deepcopy(pair("gemma2")[1]).train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    given = inputs("gemma2", "left")
    for model in (plain, checkpointed):
        real_logits(model, given, use_cache=False).square().sum().backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_structure_and_no_dense_mask_reach_the_engine(options):
    ours = pair("mistral")[1]
    given = inputs("mistral", "right")
    with torch.no_grad():
        ours(**given)
    assert all(call["window"] == (4, 0) and call["query_offset"] == 0 for call in options)
    assert all(call["key_lengths"].tolist() == [LENGTH - PADDED, LENGTH] for call in options)
    assert not any("mask" in call for call in options)

    options.clear()
    with torch.no_grad():
        ours(**inputs("mistral", "left"))
    assert all(call["mask"].shape == (2, 1, 1, LENGTH) for call in options)

    options.clear()
    ours.generate(inputs("mistral", "none")["input_ids"], max_new_tokens=3, do_sample=False)
    assert options[-1]["query_offset"] == 4  # the window's cache holds five keys
    assert not any("mask" in call for call in options)


def test_grouped_heads_are_not_copied(engine_calls):
    with torch.no_grad():
        pair("llama")[1](**inputs("llama", "none"))
    for query, key, value, *_ in engine_calls:
        assert query.shape[1] == 4
        assert key.shape[1] == value.shape[1] == 2


def test_a_static_cache_ends_at_the_last_written_key(options):
    given = inputs("llama", "none")
    pair("llama")[1].generate(
        **given, max_new_tokens=4, do_sample=False, cache_implementation="static"
    )
    assert [int(call["key_lengths"].max()) for call in options[2::2]] == [14, 15, 16]


def test_compiles_to_one_graph():
    eager, ours = pair("llama")
    given = inputs("llama", "left")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got = real_logits(compiled, given, use_cache=False)
        assert relative_error(got, real_logits(eager, given)) < 3e-6
