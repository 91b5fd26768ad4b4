from pathlib import Path

import pytest
import torch

from rayrl.errors import ModelError
from rayrl.models.folder import check_model_folder
from rayrl.models.loading import load_causal_lm
from rayrl.models.tiny import create_tiny_model
from rayrl.models.tokenizer import load_tokenizer

_SIZES = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16, "max_context": 16}


def test_tiny_model_is_an_ordinary_folder(tiny_folder: Path) -> None:
    info = check_model_folder(tiny_folder)
    assert (info.model_type, info.max_context, info.vocab_size, info.num_layers) == ("llama", 24, 14, 2)
    assert info.has_weights
    assert not info.has_chat_template


def test_tiny_model_has_the_same_weights_when_seed_is_the_same(tmp_path: Path) -> None:
    folders = [
        create_tiny_model(tmp_path / str(n), alphabet="ab", seed=seed, **_SIZES) for n, seed in enumerate((5, 5, 6))
    ]
    first, second, other = (load_causal_lm(folder).state_dict() for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_creating_a_tiny_model_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    create_tiny_model(tmp_path / "m", alphabet="ab", **_SIZES)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_each_character_is_one_token_and_comes_back(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokens = tokenizer.encode("12+34=46")
    assert tokens == [3, 4, 12, 5, 6, 13, 6, 8]
    assert tokenizer.decode([*tokens, 1, 0]) == "12+34=46"


def test_character_outside_the_alphabet_is_an_error_that_names_the_text(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot encode '1\*2'"):
        load_tokenizer(tiny_folder).encode("1*2")


@pytest.mark.parametrize("alphabet", ["", "aa"])
def test_alphabet_is_refused_when_characters_repeat_or_lack(tmp_path: Path, alphabet: str) -> None:
    with pytest.raises(ModelError, match="alphabet"):
        create_tiny_model(tmp_path / "m", alphabet=alphabet, **_SIZES)
    assert list(tmp_path.iterdir()) == []


def test_hidden_size_is_refused_when_heads_do_not_divide_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hidden_size 18 must be a multiple"):
        create_tiny_model(tmp_path / "m", alphabet="ab", **{**_SIZES, "hidden_size": 18})


def test_existing_folder_is_kept_unless_replaced(tmp_path: Path) -> None:
    folder = create_tiny_model(tmp_path / "m", alphabet="ab", **_SIZES)
    with pytest.raises(FileExistsError):
        create_tiny_model(folder, alphabet="abc", **_SIZES)
    assert check_model_folder(folder).vocab_size == 4
    create_tiny_model(folder, alphabet="abc", replace=True, **_SIZES)
    assert check_model_folder(folder).vocab_size == 5
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
