"""Which scale a model uses: named in the checkup, and no alarm where it is meant."""

from functools import cache

import numpy as np
import pytest
import torch
import transformers
from checkup_support import scales_of
from torch import nn
from watch_support import lively, randn

import levelhead.torch
from levelhead._health.verdicts import LOUD
from levelhead.checkup import Input, Subject, examine
from levelhead.report import checkup_json
from levelhead.report._scales import in_use

transformers.logging.set_verbosity_error()

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99}
SMALL = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [4]}
# Of each: the model's class, its options, and the rule in use.
MODELS = {
    "BERT": ("BertModel", SMALL, "sqrt_dk"),
    "GPT-2": ("GPT2Model", TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4}, "sqrt_dk"),
    "OPT": ("OPTModel", SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}, "sqrt_dk"),  # on q
    "T5": ("T5Model", TOKENS | T5 | {"decoder_start_token_id": 0}, "none"),
    "Gemma 2": ("Gemma2Model", GROUPED | {"query_pre_attn_scalar": 144}, "other"),
    "Gemma 2, d_k": ("Gemma2Model", GROUPED | {"query_pre_attn_scalar": 8}, "sqrt_dk"),
    "Gemma 3": ("Gemma3TextModel", GROUPED | {"query_pre_attn_scalar": 168}, "other"),
    "Granite, muP": ("GraniteModel", GROUPED | {"attention_multiplier": 1 / 8}, "dk"),
    "Qwen3, QK-norm": ("Qwen3Model", GROUPED, "sqrt_dk"),
    "OLMo2, QK-norm": ("Olmo2Model", SMALL, "sqrt_dk"),
    "Swin v2, cosine": ("Swinv2Model", SWIN | {"window_size": 4}, "other"),
    "a slip": ("GraniteModel", GROUPED | {"attention_multiplier": 32**-0.5}, "sqrt_dmodel"),
}


@cache
def subject(name, implementation):
    kind, options, _ = MODELS[name]
    kind = getattr(transformers, kind)
    config = kind.config_class(**options)
    if implementation is not None:
        config._attn_implementation = implementation
    torch.manual_seed(0)
    model = kind(config).eval()
    ids = torch.randint(3, 99, (2, 24), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}
    if kind is transformers.T5Model:
        given["decoder_input_ids"] = ids
    elif kind is transformers.Swinv2Model:
        given = {"pixel_values": randn(1, 3, 32, 32)}
    width = getattr(config, "hidden_size", None)
    return Subject(name, model, [Input("x", kwargs=given)], width)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_a_models_scale_is_named_and_no_alarm(name, implementation):
    own = name.startswith(("Swin", "Gemma 2"))  # they have no choice
    result = examine(subject(name, None if own else implementation))
    rule = MODELS[name][2]
    assert {layer["scale_rule"] for layer in result["layers"]} == {rule}
    used = next(iter(scales_of(result)))
    assert used == rule and scales_of(result)[used]["level"] == "ok"
    assert not [found for found in result["scale_findings"] if found["level"] in LOUD]
    first, *findings = in_use(result)
    assert first.startswith("Scale: ") and not findings
    checkup_json(result)


def test_a_learned_temperature_per_head_is_followed():
    class Cosine(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.attend = levelhead.torch.nn.CosineAttention(**options)

        def forward(self, x):
            return self.attend(x, x, x)

    x = randn(1, 4, 24, 16)
    for options in ({"num_heads": 4}, {}, {"learned": False}):
        model = Cosine(**options)
        if options == {"num_heads": 4}:
            with torch.no_grad():
                model.attend.log_scale.copy_(torch.tensor([5.0, 10.0, 15.0, 20.0]).log())
        (layer,) = examine(Subject("cosine", model, [Input("x", args=(x,))]))["layers"]
        scale = 12.5 if "num_heads" in options else 10
        assert (layer["scale"], layer["scale_rule"]) == (pytest.approx(scale), "other")


# ---------------------------------------------------------------- a slip


class Layers(nn.Module):
    """Layers of attention by hand, each with a scale of its own."""

    def __init__(self, *scales, heads, size):
        super().__init__()
        self.layers = nn.ModuleList(Layer(scale, heads) for scale in scales)
        lively(self, size=size)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, scale, heads):
        super().__init__()
        self.scale, self.heads, self.qk = scale, heads, nn.Linear(64, 128, bias=False)

    def forward(self, x):
        q, k = self.qk(x).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, 1)
        v = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        weights = (self.scale * q @ k.mT).softmax(-1)
        return nn.functional.layer_norm((weights @ v).transpose(1, 2).flatten(2) + x, (64,))


def examined(*scales, heads, size):
    model = Layers(*scales, heads=heads, size=size)
    return examine(Subject("by hand", model, [Input("x", args=(randn(2, 32, 64),))], width=64))


def test_a_forgotten_scale_that_saturates_is_told():
    result = examined(1.0, 1.0, heads=2, size=0.25)
    (found,) = result["scale_findings"]
    assert (found["rule"], found["level"], found["scope"]) == ("none", "info", "model")
    assert found["layers"] == ["layers.0", "layers.1"]
    heads = [head for layer in result["layers"] for head in layer["heads"]]
    share = np.mean([head["saturated"] for head in heads])
    assert found["evidence"]["saturated"] == pytest.approx(share) and share > 0.5
    assert found["reason"].startswith(f"there is no scale, and {share:.0%} of the rows are satur")
    scale, told = in_use(result)
    assert scale == "Scale: none in all 2 layers."
    assert told.startswith("There is no scale") and "→ nothing if the model was trained" in told
    # The same without saturation, as in a model that has learned to do without: no word.
    assert examined(1.0, heads=2, size=0.05)["scale_findings"] == []


def test_the_models_width_for_the_heads_is_told_if_nothing_is_chosen():
    result = examined(0.5, 1 / 8, heads=16, size=0.15)  # the second 1/√64, d_k being 4
    (found,) = result["scale_findings"]
    assert (found["rule"], found["level"], found["scope"]) == ("sqrt_dmodel", "info", "layer")
    assert found["layers"] == ["layers.1"]
    assert found["evidence"]["entropy_ratio"] > 0.9
    assert next(in_use(result)) == "Scale: 1/√d_k in layers.0; 1/√d_model in layers.1."
    assert next(iter(scales_of(result))) == "mixed"
    assert scales_of(result)["mixed"]["words"] == "2 different scales"
