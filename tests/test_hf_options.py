"""The options that transformers hands to attention: computed, known to be harmless, or refused."""

import doctest
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AttentionInterface, BertModel, BloomConfig, BloomModel, XLMModel
from transformers.masking_utils import AttentionMaskInterface

import levelhead.hf
from levelhead.hf import _attention, _register
from levelhead.hf._attention import attention_forward
from levelhead.hf._masks import attention_mask

transformers.logging.set_verbosity_error()
levelhead.hf.register()
BATCH, HEADS, ROWS, KEYS, D = 2, 4, 6, 6, 8


class Layer(torch.nn.Module):
    """What attention_forward asks of a model's layer."""

    def __init__(self, is_causal=False, training=False):
        super().__init__()
        self.is_causal = is_causal
        self.train(training)


def tensors(rows=ROWS, keys=KEYS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(BATCH, HEADS, rows, D, generator=generator)
    key, value = torch.randn(2, BATCH, HEADS, keys, D, generator=generator)
    return query, key, value


def textbook(query, key, value, visible=None, bias=0.0, scale=D**-0.5):
    """Attention as transformers lays it out: (batch, rows, heads, D)."""
    scores = query @ key.mT * scale + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def close(got, expected):
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=1e-5)


TRIANGLE = torch.ones(ROWS, KEYS).tril().bool()


@pytest.mark.parametrize("of_layer", [False, True, None])
@pytest.mark.parametrize("of_call", [False, True, None])
def test_without_a_mask_the_causal_flag_decides(of_call, of_layer):
    layer = Layer(is_causal=of_layer)
    if of_layer is None:
        del layer.is_causal  # encoders without the flag are not causal, as in eager
    causal = bool(of_layer if of_call is None else of_call)
    got, weights = attention_forward(layer, *tensors(), None, is_causal=of_call)
    close(got, textbook(*tensors(), TRIANGLE if causal else None))
    assert weights is None


def test_one_query_without_a_mask_sees_every_key():
    got, _ = attention_forward(Layer(is_causal=True), *tensors(rows=1), None)
    close(got, textbook(*tensors(rows=1)))


def test_a_window_without_a_mask():
    got, _ = attention_forward(Layer(is_causal=True), *tensors(), None, sliding_window=2)
    band = TRIANGLE & torch.ones(ROWS, KEYS).triu(-1).bool()
    close(got, textbook(*tensors(), band))
    wide, _ = attention_forward(Layer(), *tensors(), None, sliding_window=KEYS)
    close(wide, textbook(*tensors()))
    with pytest.raises(ValueError, match="sliding_window: expected a mask with it in Layer, got 2"):
        attention_forward(Layer(), *tensors(), None, sliding_window=2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_the_users_own(dtype):
    visible = torch.rand(BATCH, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(3)) > 0.3
    visible |= torch.eye(ROWS).bool()
    lowest = torch.finfo(torch.float32).min
    mask = (
        visible if dtype is torch.bool else torch.zeros(visible.shape).masked_fill(~visible, lowest)
    )
    got, _ = attention_forward(Layer(is_causal=True), *tensors(), mask)
    close(got, textbook(*tensors(), visible))


MASKS = {
    "no mask": (None, torch.ones(ROWS, KEYS).bool()),
    "structured": (lambda: attention_mask(BATCH, ROWS, KEYS), TRIANGLE),
    "padded": (
        lambda: attention_mask(BATCH, ROWS, KEYS, attention_mask=torch.arange(KEYS)[None] > 0),
        TRIANGLE & (torch.arange(KEYS) > 0),
    ),
    "bool": (lambda: TRIANGLE[None, None], TRIANGLE),
    "float": (lambda: attention_mask(BATCH, ROWS, KEYS).clone(), TRIANGLE),
}


@pytest.mark.parametrize("mask", MASKS)
def test_position_bias_with_any_mask_and_its_gradient(mask):
    make, visible = MASKS[mask]
    bias = torch.randn(1, HEADS, ROWS, KEYS, generator=torch.Generator().manual_seed(5))
    bias, same = (bias.clone().requires_grad_() for _ in range(2))
    rows = slice(1, None)  # the first sees nothing where the first key is padding
    got, _ = attention_forward(Layer(), *tensors(), make and make(), position_bias=bias)
    expected = textbook(*tensors(), visible, same)
    close(got[:, rows], expected[:, rows])
    got[:, rows].square().sum().backward()
    expected[:, rows].square().sum().backward()
    close(bias.grad, same.grad)
    assert bias.grad.abs().max() > 1e-2


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences(mask):
    make, visible = MASKS[mask]
    starts = torch.tensor([0, 2, ROWS], dtype=torch.int32)
    part = torch.tensor([0, 0, 1, 1, 1, 1])
    visible = visible & (part[:, None] == part)
    got, _ = attention_forward(
        Layer(),
        *tensors(),
        make and make(),
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=4,
        max_length_k=4,
    )
    close(got[:, 1:], textbook(*tensors(), visible)[:, 1:])


def test_keys_that_a_sparse_model_chose():
    chosen = torch.stack([torch.randperm(KEYS, generator=torch.Generator().manual_seed(i))[:3]
                          for i in range(BATCH * ROWS)]).view(BATCH, ROWS, 3)  # fmt: skip
    visible = (chosen[..., None] == torch.arange(KEYS)).any(-2)[:, None]
    got, _ = attention_forward(Layer(), *tensors(), None, indices=chosen.int())
    close(got, textbook(*tensors(), visible))


def test_a_learned_scale_gets_its_gradient():
    scale, same = (torch.tensor(0.7, requires_grad=True) for _ in range(2))
    got, _ = attention_forward(Layer(), *tensors(), None, scaling=scale)
    expected = textbook(*tensors(), scale=same)
    close(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    close(scale.grad, same.grad)


def test_weights_carry_a_gradient():
    (q, k, v), (q2, k2, _) = ([x.requires_grad_() for x in tensors()] for _ in range(2))
    sinks, same = (torch.ones(HEADS, requires_grad=True) for _ in range(2))
    _, got = attention_forward(Layer(), q, k, v, None, s_aux=sinks, output_attentions=True)
    scores = torch.cat(
        [q2 @ k2.mT * D**-0.5, same.view(HEADS, 1, 1).expand(BATCH, -1, ROWS, 1)], -1
    )
    expected = scores.softmax(-1)[..., :-1]
    close(got, expected)
    pull = torch.randn(got.shape, generator=torch.Generator().manual_seed(4))
    (got * pull).sum().backward()
    (expected * pull).sum().backward()
    for gradient, wanted in ((q, q2), (k, k2), (sinks, same)):
        close(gradient.grad, wanted.grad)


def test_dropout_follows_the_seed_and_shows_in_the_weights():
    query, key, value = tensors()
    layer = Layer(training=True)

    def run(seed):
        torch.manual_seed(seed)
        return attention_forward(
            layer, query, key, value, None, dropout=0.5, output_attentions=True
        )

    (output, weights), (again, _), (other, _) = run(1), run(1), run(2)
    assert torch.equal(output, again)
    assert not torch.equal(output, other)
    close(output, (weights @ value).transpose(1, 2))
    assert 0.3 < float((weights == 0).float().mean()) < 0.7
    plain, _ = attention_forward(layer.eval(), query, key, value, None, dropout=0.5)
    close(plain, textbook(query, key, value))


def test_an_unknown_option_raises_unless_told_to_ignore(monkeypatch):
    monkeypatch.setattr(_attention, "IGNORED", set())
    bias = torch.ones(1)
    with pytest.raises(ValueError) as error:
        attention_forward(Layer(), *tensors(), None, alibi=bias)
    assert str(error.value) == (
        "alibi: levelhead does not know this option of Layer and will not ignore it, as it may "
        'change attention. Use attn_implementation="eager", or '
        "levelhead.hf.register(ignore=['alibi']) if it changes nothing"
    )
    for unset in (None, False):
        attention_forward(Layer(), *tensors(), None, alibi=unset)
    levelhead.hf.register(ignore=["alibi"])
    got, _ = attention_forward(Layer(), *tensors(), None, alibi=bias)
    close(got, textbook(*tensors()))


@pytest.mark.parametrize("name", ["cache", "block_indices", "head_mask"])
def test_options_that_change_attention_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: levelhead does not know this option"):
        attention_forward(Layer(), *tensors(), None, **{name: torch.ones(1)})


@pytest.mark.parametrize("name", sorted(_attention.HARMLESS))
def test_harmless_options_change_nothing(name):
    got, _ = attention_forward(Layer(), *tensors(), None, **{name: torch.ones(1)})
    close(got, textbook(*tensors()))


def test_a_causal_mask_against_the_call_raises():
    with pytest.raises(ValueError, match=r"is_causal: .* set model.config.is_causal = False"):
        attention_forward(Layer(), *tensors(), attention_mask(BATCH, ROWS, KEYS), is_causal=False)


def test_models_that_cannot_be_reached():
    assert levelhead.hf.supports(BertModel)
    assert not levelhead.hf.supports(BloomModel)
    assert not levelhead.hf.supports(XLMModel)
    config = BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
    config._attn_implementation = "levelhead"
    model = BloomModel(config)
    assert not levelhead.hf.supports(model)
    with pytest.raises(
        ValueError, match='attn_implementation="levelhead" cannot reach bloom models'
    ):
        model(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="model: expected a transformers model or its class, got 3"):
        levelhead.hf.supports(3)


def test_registering_adds_one_name_and_touches_no_other():
    before = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    assert levelhead.hf.register() == levelhead.hf.register() == levelhead.hf.NAME == "levelhead"
    for mapping, old in zip((AttentionInterface, AttentionMaskInterface), before, strict=True):
        assert mapping._global_mapping == old
        assert mapping._global_mapping["levelhead"].__module__.startswith("levelhead.hf.")
        assert mapping._global_mapping["sdpa"].__module__.startswith("transformers.")


def run(code):
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_import_brings_no_framework():
    code = "import sys, levelhead.hf; print({'torch', 'transformers'} & {*sys.modules})"
    assert run(code) == "set()"


def test_without_transformers_it_says_what_to_install():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import levelhead.hf\n"
        "try: levelhead.hf.register()\n"
        "except ImportError as error: print(error)"
    )
    assert run(code) == (
        "levelhead.hf needs PyTorch and transformers 5 or newer (import of transformers halted; "
        'None in sys.modules): pip install "levelhead[hf]"'
    )


def test_examples_in_docstrings():
    failed, tried = doctest.testmod(_register)
    assert failed == 0
    assert tried > 5
