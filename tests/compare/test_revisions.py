"""Files of a git revision: which are written, where the imports come from, errors."""

import os
import sys
import types
from pathlib import Path

import pytest
from repository import git, repository

from normscope.compare.revisions import check_out, split
from normscope.compare.served import move_paths, strangers
from normscope.errors import UsageError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = repository(tmp_path / "code")
    monkeypatch.chdir(folder)
    return folder


def index(folder: Path) -> bytes:
    return (folder / ".git" / "index").read_bytes()


def test_a_revision_is_written_whole_and_the_repository_stays(here: Path) -> None:
    (here / ".gitattributes").write_text("blocks.py export-ignore\n")
    git(here, "add", "-A")
    git(here, "commit", "-q", "-m", "attributes")
    (here / "blocks.py").write_text("staged and not committed")
    git(here, "add", "-A")
    before, status = index(here), git(here, "status", "--short")
    revision = check_out("HEAD~2", "git:HEAD~2:model.py:build")
    assert "EPS = 1e-5" in (revision.here / "blocks.py").read_text()
    latest = check_out("main", "git:main:model.py:build")
    assert "EPS = 1e-6" in (latest.here / "blocks.py").read_text()  # although export-ignore
    assert (index(here), git(here, "status", "--short")) == (before, status)
    for each in (revision, latest):
        each.close()
        assert not each.root.exists()


def test_the_folder_of_a_revision_is_the_current_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "new").mkdir()
    monkeypatch.chdir(here / "new")
    revision = check_out("HEAD", "git:HEAD:../model.py:build")
    assert revision.here.name == "new"
    assert (revision.here / "../model.py").is_file()
    revision.close()


def test_a_git_hook_of_another_repository_does_not_matter(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other")
    git(other, "commit", "-q", "--amend", "-m", "another message")
    commit = git(here, "rev-parse", "HEAD")
    for name, value in (("GIT_DIR", other / ".git"), ("GIT_INDEX_FILE", other / ".git" / "index")):
        monkeypatch.setenv(name, str(value))
    revision = check_out("HEAD", "git:HEAD:model.py:build")
    assert (revision.top, revision.commit) == (here.resolve(), commit)
    revision.close()


def test_submodules_come_with_their_commit(here: Path, tmp_path: Path) -> None:
    repository(tmp_path / "part")
    git(here, "submodule", "--quiet", "add", str(tmp_path / "part"), "part")
    git(here, "commit", "-q", "-m", "part")
    (here / "part" / "blocks.py").write_text("changed and not committed")
    revision = check_out("HEAD", "git:HEAD:model.py:build")
    assert "EPS = 1e-6" in (revision.here / "part" / "blocks.py").read_text()
    assert revision.notes == ()
    revision.close()


def test_a_submodule_that_is_not_checked_out_is_noted(here: Path, tmp_path: Path) -> None:
    repository(tmp_path / "part")
    git(here, "submodule", "--quiet", "add", str(tmp_path / "part"), "part")
    git(here, "commit", "-q", "-m", "part")
    git(here, "submodule", "--quiet", "deinit", "--force", "part")
    revision = check_out("HEAD", "git:HEAD:model.py:build")
    assert len(revision.notes) == 1
    assert revision.notes[0].startswith("submodule part is missing")
    revision.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("git:HEAD:model.py:build", ("HEAD", "model.py:build")),
        ("git:v1.0/x:a/model.py:build,depth=3", ("v1.0/x", "a/model.py:build,depth=3")),
        ("git:HEAD~1:hf:config.json", ("HEAD~1", "hf:config.json")),
    ],
)
def test_revision_and_model_of_a_text(text: str, expected: tuple[str, str]) -> None:
    assert split(text) == expected


@pytest.mark.parametrize(
    ("text", "do"),
    [
        ("git:model.py:build", '"git:HEAD:model.py:build"'),
        ("git:HEAD:model.py", "name the factory too"),
        ("git:", "write both"),
        ("git:HEAD:nn:decoder", 'write "nn:decoder" alone'),
    ],
)
def test_a_text_without_revision_or_model_is_refused(text: str, do: str) -> None:
    with pytest.raises(UsageError, match="git:REV:path") as refused:
        split(text)
    assert do in str(refused.value)


def test_an_unknown_revision_is_refused_with_the_nearest_name(here: Path) -> None:
    with pytest.raises(UsageError, match='revision "mian"') as refused:
        check_out("mian", "git:mian:model.py:build")
    assert 'the nearest name is "main"' in str(refused.value)


def test_a_shallow_clone_is_told_to_fetch(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{here}", "shallow")
    monkeypatch.chdir(tmp_path / "shallow")
    with pytest.raises(UsageError, match="git fetch --unshallow"):
        check_out("HEAD~1", "git:HEAD~1:model.py:build")


def test_a_branch_of_the_remote_only_is_named(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(here, "branch", "work")
    git(tmp_path, "clone", "-q", str(here), "clone")
    monkeypatch.chdir(tmp_path / "clone")
    with pytest.raises(UsageError, match="git:origin/work:model"):
        check_out("work", "git:work:model.py:build")


def test_outside_of_a_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UsageError, match="no git repository"):
        check_out("HEAD", "git:HEAD:model.py:build")


def test_without_git_the_error_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(UsageError, match="install git"):
        check_out("HEAD", "git:HEAD:model.py:build")


def test_paths_of_the_working_tree_become_those_of_the_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, root = tmp_path / "top", tmp_path / "root"
    for folder in (top / "src", root / "src", top / "data", root / ".venv/lib/site-packages"):
        folder.mkdir(parents=True)
    installed = str(top / ".venv/lib/site-packages")
    table = types.ModuleType("__editable___ours_finder")
    table.MAPPING = {"ours": str(top / "src")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__editable___ours_finder", table)
    monkeypatch.setattr(sys, "path", [str(top / "src"), str(top / "data"), installed, "/elsewhere"])
    move_paths(top, root)
    assert sys.path == [str(root / "src"), str(top / "data"), installed, "/elsewhere"]
    assert {"ours": str(root / "src")} == table.MAPPING  # type: ignore[attr-defined]


def test_modules_of_the_working_tree_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert strangers(tmp_path) == ()
    for name, place in (("ours.part", "ours/part.py"), ("theirs", ".venv/site-packages/theirs.py")):
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / place)
        monkeypatch.setitem(sys.modules, name, module)
    assert strangers(tmp_path) == ("ours came from the files as they are, because the revision lacks them",)
