"""The run folder: what a new one holds, whose it is, and who may use it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayrl.errors import RunFolderError
from rayrl.tracking.provenance import git_state, package_versions
from rayrl.tracking.run_folder import RunFolder, check_output

HOLDER = """
import sys
from rayrl.tracking.run_folder import RunFolder
folder = RunFolder.create(sys.argv[1], "a: 1\\n", "d", ["x"], resume=False)
print("ready", flush=True)
sys.stdin.read()
"""


def create(path: Path, resume: bool = False, config: str = "a: 1\n") -> RunFolder:
    return RunFolder.create(path, config, "digest", ["rayrl", "train", "c.yaml"], resume)


def content(path: Path) -> dict[str, bytes]:
    return {str(item.relative_to(path)): item.read_bytes() for item in path.rglob("*") if item.is_file()}


def test_new_folder_holds_config_origin_and_layout(tmp_path: Path) -> None:
    with create(tmp_path / "runs" / "one") as folder:
        info = json.loads((folder.path / "run.json").read_text())

        assert folder.config_path.read_text() == "a: 1\n"
        assert info["run_id"] == folder.run_id
        assert info["command"] == ["rayrl", "train", "c.yaml"]
        assert info["config_digest"] == "digest"
        assert {"python", "rayrl", "torch", "ray", "transformers", "pydantic"} <= info["versions"].keys()
        assert all(item.is_dir() for item in (folder.checkpoints, folder.rollouts, folder.logs, folder.export))
        assert not folder.resumed


def test_relative_folder_becomes_absolute_since_workers_have_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with create(Path("runs/one")) as folder:
        assert folder.path == tmp_path / "runs" / "one"


def test_folder_of_a_run_is_refused_and_untouched_without_resume(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    before = content(tmp_path / "one")

    with pytest.raises(RunFolderError, match=r"one already holds a run.*--resume auto.*run\.name.*remove"):
        create(tmp_path / "one", config="b: 2\n")

    assert content(tmp_path / "one") == before


def test_refusal_says_so_when_the_run_was_interrupted_while_it_started(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", "a: 1\n", "d", ["rayrl"], resume=False).close()
    with pytest.raises(RunFolderError, match=r"interrupted while it started; continue it with `--resume auto`"):
        RunFolder.create(tmp_path / "run", "a: 1\n", "d", ["rayrl"], resume=False)
    (tmp_path / "run" / "ledger.sqlite").touch()
    with pytest.raises(RunFolderError, match=r"already holds a run; continue"):
        RunFolder.create(tmp_path / "run", "a: 1\n", "d", ["rayrl"], resume=False)


FAILURE = """Traceback (most recent call last):
  File "run.py", line 1, in main
    start()
    ^^^^^^^
rayrl.errors.EngineError: inference-0 did not start: vLLM cannot be imported
  node: n1
Error: a line of the message
"""


def test_refusal_says_why_when_the_run_failed_while_it_started(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    (tmp_path / "run" / "logs" / "failure.txt").write_text(FAILURE)
    with pytest.raises(
        RunFolderError,
        match=r"holds a run that failed while it started \(EngineError: inference-0 did not start: vLLM cannot be "
        r"imported\); continue it with `--resume auto`",
    ):
        create(tmp_path / "run")
    (tmp_path / "run" / "ledger.sqlite").touch()
    with pytest.raises(RunFolderError, match=r"already holds a run; continue"):
        create(tmp_path / "run")


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_check_says_what_create_says_when_the_folder_cannot_be_made(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError) as made:
        create(tmp_path / root / "one")
    with pytest.raises(RunFolderError) as checked:
        check_output(tmp_path / root / "one")
    assert str(checked.value) == str(made.value)


def test_check_writes_nothing_when_the_folder_can_be_made(tmp_path: Path) -> None:
    assert check_output(tmp_path / "a" / "b").endswith("a/b: can be written")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_something_else_is_refused_and_untouched(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    (tmp_path / "thesis.tex").write_text("years of work")
    before = content(tmp_path)

    with pytest.raises(RunFolderError, match=r"is not the folder of a run: it has config.yaml, thesis.tex"):
        create(tmp_path, resume=resume)

    assert content(tmp_path) == before


def test_config_file_put_there_by_a_person_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")

    with pytest.raises(RunFolderError):
        create(tmp_path)

    assert (tmp_path / "config.yaml").read_text() == "mine"


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")

    with pytest.raises(RunFolderError, match="is a file"):
        create(tmp_path / "one")


def test_output_root_that_is_a_file_gives_the_path_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")

    with pytest.raises(RunFolderError, match=r"root/one: Not a directory; change run\.output_root"):
        create(tmp_path / "root" / "one")


def test_resume_starts_a_new_run_when_there_is_none(tmp_path: Path) -> None:
    with create(tmp_path / "one", resume=True) as folder:
        assert not folder.resumed


def test_resume_keeps_the_run_id_and_changes_nothing_until_it_is_accepted(tmp_path: Path) -> None:
    with create(tmp_path / "one") as first:
        run_id = first.run_id
    before = content(tmp_path / "one")
    del before["run.lock"]

    with create(tmp_path / "one", resume=True, config="a: 2\n") as folder:
        after = content(tmp_path / "one")
        del after["run.lock"]
        assert (folder.run_id, folder.resumed, folder.saved_config()) == (run_id, True, "a: 1\n")
        assert after == before


def test_accepted_resume_keeps_the_earlier_config_and_is_recorded(tmp_path: Path) -> None:
    create(tmp_path / "one").close()

    with create(tmp_path / "one", resume=True, config="a: 2\n") as folder:
        folder.accept_resume()
        folder.accept_resume()
    info = json.loads((tmp_path / "one" / "run.json").read_text())

    assert (tmp_path / "one" / "config.yaml").read_text() == "a: 2\n"
    assert (tmp_path / "one" / "config.before_resume_1.yaml").read_text() == "a: 1\n"
    assert [entry["command"] for entry in info["resumes"]] == [["rayrl", "train", "c.yaml"]]


def test_folder_of_a_run_killed_while_it_was_made_is_made_again(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    (tmp_path / "one" / "run.json").unlink()

    with create(tmp_path / "one", resume=True) as folder:
        assert not folder.resumed
        assert (folder.path / "run.json").is_file()


def test_half_made_folder_with_a_checkpoint_inside_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    (tmp_path / "one" / "run.json").unlink()
    (tmp_path / "one" / "checkpoints" / "step_000001").mkdir()

    with pytest.raises(RunFolderError, match=r"no run\.json"):
        create(tmp_path / "one", resume=True)


def test_damaged_origin_is_refused_on_resume(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    (tmp_path / "one" / "run.json").write_text('{"run_id"')

    with pytest.raises(RunFolderError, match=r"cannot read .*run\.json"):
        create(tmp_path / "one", resume=True)


def test_second_process_is_refused_with_the_pid_of_the_first_and_enters_once_that_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "one")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        for resume in (False, True):
            with pytest.raises(RunFolderError, match=rf"in use by the process with pid {holder.pid}"):
                create(tmp_path / "one", resume=resume)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=30)

    with create(tmp_path / "one", resume=True) as folder:
        assert folder.resumed


def test_lock_is_free_again_when_creation_failed(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    with pytest.raises(RunFolderError, match="already holds a run"):
        create(tmp_path / "one")

    with create(tmp_path / "one", resume=True) as folder:
        assert folder.resumed


def test_git_state_is_commit_and_whether_tracked_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e@x")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "c")
    (tmp_path / "runs.log").write_text("untracked files do not count")

    clean = git_state(tmp_path)
    (tmp_path / "code.py").write_text("2")
    dirty = git_state(tmp_path)

    assert clean is not None and dirty is not None
    assert (clean["dirty"], dirty["dirty"]) == (False, True)
    assert len(clean["commit"]) == 40


def test_git_state_is_none_outside_a_checkout(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None


def test_versions_are_read_without_importing_the_packages() -> None:
    code = (
        "import sys; from rayrl.tracking.provenance import package_versions as v; assert v()['torch'];"
        "print([m for m in ('torch', 'ray', 'transformers', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"
    assert "hostname" not in package_versions()
