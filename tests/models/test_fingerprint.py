"""The fingerprint of a model folder."""

from pathlib import Path

import pytest

from rayrl.models.fingerprint import model_fingerprint


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "{ }"), ("tokenizer.json", "{}"), ("model.safetensors", "longer"), ("chat_template.jinja", "x")],
)
def test_fingerprint_changes_when_a_file_that_the_model_is_made_of_does(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("long")
    before = model_fingerprint(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    assert model_fingerprint(tmp_path) == before

    (tmp_path / name).write_text(content)

    assert model_fingerprint(tmp_path) != before
