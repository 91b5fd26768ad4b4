import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayrl.errors import ModelError
from rayrl.models.folder import check_model_folder

_CONFIG = {"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 10, "num_hidden_layers": 2}


def _write(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_missing_folder_names_the_import_command_and_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent' does not exist.*rayrl models import.*model\.path"):
        check_model_folder(tmp_path / "absent")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/quickstart/quickstart-sft/export", "rayrl sft configs/quickstart_sft.yaml"),
        ("runs/quickstart/quickstart-dpo/export", "first do the run whose run.name is 'quickstart-dpo'"),
        ("models/quickstart-tiny", "`rayrl models create-tiny models/quickstart-tiny`"),
    ],
)
def test_missing_folder_that_an_earlier_part_makes_names_that_part(path: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_model_folder(path)

    assert said in str(caught.value) and "make quickstart" in str(caught.value)
    assert "smollm2" not in str(caught.value)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_model_folder(tmp_path)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        check_model_folder(_write(tmp_path, _CONFIG))


def test_broken_config_is_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, _CONFIG, {})
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        check_model_folder(folder)


def test_chat_template_is_found_in_either_place(tmp_path: Path) -> None:
    inside = _write(tmp_path / "inside", _CONFIG, {"chat_template": "{{ messages }}"})
    beside = _write(tmp_path / "beside", _CONFIG, {})
    (beside / "chat_template.jinja").write_text("{{ messages }}")
    none = _write(tmp_path / "none", _CONFIG, {})
    assert [check_model_folder(folder).has_chat_template for folder in (inside, beside, none)] == [True, True, False]


def test_nested_text_config_is_read(tmp_path: Path) -> None:
    folder = _write(tmp_path, {"model_type": "gemma3", "text_config": _CONFIG}, {})
    info = check_model_folder(folder)
    assert (info.model_type, info.vocab_size, info.max_context) == ("gemma3", 10, 64)


def test_missing_layer_count_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="states no num_hidden_layers"):
        check_model_folder(_write(tmp_path, {"vocab_size": 3}, {}))


def test_importing_folder_tokenizer_and_importing_loads_no_heavy_library() -> None:
    code = (
        "import sys, rayrl.models.folder, rayrl.models.tokenizer, rayrl.models.importing, rayrl.models.tiny;"
        "print([name for name in ('torch', 'transformers', 'tokenizers', 'gguf') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
