"""What errors say beside what is wrong: what came, and the name that was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

# What PyTorch, Hugging Face, flash-attention and JAX call the options of `attention`.
_ELSEWHERE = {
    "attention_mask": "mask",
    "attn_bias": "mask",
    "attn_mask": "mask",
    "bias": "mask",
    "dropout_p": "dropout",
    "is_causal": "causal",
    "key_value_seq_lengths": "key_lengths",
    "need_weights": "return_weights",
    "output_attentions": "return_weights",
    "s_aux": "sinks",
    "scaling": "scale",
    "softmax_scale": "scale",
}


def shown(value: Any) -> str:
    """What came, in one short line, whatever it is.

    >>> from levelhead._hints import shown
    >>> shown("a"), shown(10**5000)
    ("'a'", 'an object of type int that cannot be printed')
    """
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except Exception:  # Python prints no int of more than some thousand digits
        return f"an object of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= 100 else f"{text[:97]}..."


def nearest(given: Any, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that a misspelt one is most like, if any is like it."""
    if not isinstance(given, str):
        return None
    return next(iter(get_close_matches(given, list(known), 1, cutoff)), None)


def did_you_mean(given: Any, known: Iterable[str], form: str = "did you mean {}?") -> str:
    """The question with the nearest known name filled in; nothing if none is near.

    >>> from levelhead._hints import did_you_mean
    >>> did_you_mean("entrpy", ["entropy", "rows"])
    'did you mean entropy?'
    """
    name = nearest(given, known)
    return "" if name is None else form.format(name)


def refuse_options(function: Callable[..., Any], given: Mapping[str, Any]) -> NoReturn:
    """Raise for the first of some options that a function does not have."""
    name, known = next(iter(given)), function.__kwdefaults__ or {}
    meant = _ELSEWHERE.get(name) or nearest(name, known)
    hint = f"did you mean {meant}?" if meant in known else f"there are: {', '.join(known)}"
    raise TypeError(f"{function.__name__} has no option {name}; {hint}")
