import json
import shutil
from pathlib import Path

import pytest

from rayrl.errors import ModelError
from rayrl.models.tokenizer import load_tokenizer
from rayrl.types.prompt import Message

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.content + '=' }}{% endfor %}{% if add_generation_prompt %}{{ '+' }}{% endif %}"
)


@pytest.fixture
def chat_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def test_chat_is_encoded_with_the_opening_of_the_answer(chat_folder: Path) -> None:
    tokenizer = load_tokenizer(chat_folder)
    tokens = tokenizer.encode_chat([Message(role="system", content="1"), Message(role="user", content="2")])
    assert tokenizer.has_chat_template
    assert tokens == tokenizer.encode("1=2=+")


def test_chat_is_refused_without_template_and_the_error_names_the_way_out(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match=r"rollout\.workflow\.prompt_format: text"):
        tokenizer.encode_chat([Message(role="user", content="1")])


def test_roles_are_named_when_the_template_refuses_them(chat_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"\['tool'\].*no tools"):
        load_tokenizer(chat_folder).encode_chat([Message(role="tool", content="1")])


def test_end_tokens_join_generation_config_and_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    assert load_tokenizer(folder).eos_token_ids == (5, 1)
    assert load_tokenizer(tiny_folder).eos_token_ids == (1,)


def test_sizes_and_padding_are_those_of_the_tokenizer(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    assert (tokenizer.vocab_size, tokenizer.pad_token_id) == (14, 0)


def test_missing_folder_is_a_model_error_and_no_hub_is_asked(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(tmp_path / "owner" / "model")
