import json
import shutil
from pathlib import Path

import pytest

from rayrl.config.model import ModelConfig
from rayrl.errors import ModelError
from rayrl.models.context import context_limit


def test_limit_is_the_models_own_unless_a_smaller_one_is_set(tiny_folder: Path) -> None:
    assert context_limit(ModelConfig(path=str(tiny_folder))) == 24
    assert context_limit(ModelConfig(path=str(tiny_folder), max_context=10)) == 10


def test_limit_above_the_models_own_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.max_context=25 is more than the 24"):
        context_limit(ModelConfig(path=str(tiny_folder), max_context=25))


def test_limit_must_be_set_when_the_model_states_none(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"set model\.max_context"):
        context_limit(ModelConfig(path=str(folder)))
    assert context_limit(ModelConfig(path=str(folder), max_context=7)) == 7
