"""Files and folders as one text, against the same bytes in memory; only requested bytes are read."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.subjects import files as files_module
from normscope.subjects import text as text_module
from normscope.subjects.corpus import Corpus, encode
from normscope.subjects.files import Files, state_of
from normscope.subjects.text import Text, load_text

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)


def plain_windows(data: bytes, size: int, length: int, seed: int) -> list[list[list[int]]]:
    """The windows by definition: slices at the generator's positions."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(3):
        starts = generator.integers(0, len(data) - length + 1, size=size)
        batches.append([list(data[start : start + length]) for start in starts])
    return batches


def three(corpus: Corpus, size: int, length: int, seed: int) -> list[list[list[int]]]:
    return [batch.tolist() for batch in itertools.islice(corpus.windows(size, length, seed), 3)]


def folder_of(parts: list[str], folder: Path) -> Path:
    folder.mkdir()
    for index, part in enumerate(parts):
        (folder / f"{index:05}.txt").write_bytes(part.encode())
    return folder


@given(st.lists(WORDS, min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 9))
def test_a_folder_is_its_files_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], length: int, seed: int
) -> None:
    data = "".join(parts).encode()
    if not data.strip() or len(data) < length:
        return
    text = load_text(folder_of(parts, tmp_path_factory.mktemp("texts") / "folder"))
    assert text.read(0, len(text)).tobytes() == data
    for start in range(0, len(data), 3):
        assert text.read(start, min(start + length, len(data))).tobytes() == data[start : start + length]
    assert text.counts().tolist() == np.bincount(list(data), minlength=256).tolist()
    assert three(encode(text, 256), 2, length, seed) == plain_windows(data, 2, length, seed)


@given(st.binary(min_size=20, max_size=60), st.floats(0, 0.8), st.integers(1, 4))
def test_training_never_sees_what_is_kept_for_validation(data: bytes, share: float, length: int) -> None:
    corpus = encode(Text("t", data, share), 256)
    cut = len(data) - int(share * len(data))
    assert three(corpus, 3, length, 1) == plain_windows(data[:cut], 3, length, 1)
    assert corpus.counts.tolist() == np.bincount(list(data[:cut])).tolist() + [0] * (
        256 - max(data[:cut]) - 1
    )
    if share == 0:
        assert corpus.held_out is None
    elif corpus.held_out is not None and len(corpus.held_out) >= length:
        assert three(corpus.held_out, 3, length, 1) == plain_windows(data[cut:], 3, length, 1)


def test_counts_of_a_stretch_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_CHUNK", 7)
    text = load_text(folder_of(["abc" * 5, "cd" * 9, "ef"], tmp_path / "folder"))
    data = text.read(0, len(text)).tobytes()
    for start, stop in ((0, len(data)), (0, 20), (0, 0), (3, 31), (30, len(data))):
        expected = np.bincount(np.frombuffer(data[start:stop], np.uint8), minlength=256)
        assert text.counts(start, stop).tolist() == expected.tolist()


def test_what_a_folder_leaves_out(tmp_path: Path) -> None:
    folder = folder_of(["one ", "two "], tmp_path / "folder")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes(b"caf\xe9 and more")
    (folder / "empty.txt").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / ".hidden").write_text("hidden")
    (folder / "0").mkdir()
    (folder / "0" / "deep.txt").write_text("zero ")
    (folder / "one again").symlink_to(folder / "00000.txt")
    (folder / "all again").symlink_to(folder)
    (folder / "nothing").symlink_to(folder / "nowhere")
    text = load_text(folder)
    assert text.read(0, len(text)).tobytes() == b"zero one two "
    assert text.name == f'"{folder}" (3 files, 2 without UTF-8 text left out)'


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    folder = folder_of(["one ", "two "], tmp_path / "folder")
    (folder / "00001.txt").chmod(0)
    assert "1 file, 1 without" in load_text(folder).name
    with pytest.raises(UsageError, match="Permission denied"):
        load_text(folder / "00001.txt")


def test_more_files_than_a_process_may_keep_open(tmp_path: Path) -> None:
    parts = [f"{index} " for index in range(2000)]
    text = load_text(folder_of(parts, tmp_path / "folder"))
    before = len(os.listdir("/proc/self/fd"))
    assert text.read(0, len(text)).tobytes() == "".join(parts).encode()
    assert len(os.listdir("/proc/self/fd")) - before <= files_module._MAPS


def test_a_character_cut_at_the_end_is_text_still(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("naïve café".encode()[:-1])
    assert len(load_text(path)) == 11


def test_a_file_that_changes_is_another_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("before")
    first = load_text(path)
    path.write_text("afterwards")
    second = load_text(path)
    assert second.read(0, len(second)).tobytes() == b"afterwards"
    assert second.counts()[ord("a")] == 2
    assert len(first) == 6


def test_a_file_that_is_looked_at_again_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_text("some text")
    load_text(path)
    monkeypatch.setattr(files_module.np, "bincount", None)
    assert load_text(path).counts()[ord("t")] == 2


def test_a_utf_8_character_across_two_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_CHUNK", 3)
    (tmp_path / "good").write_text("ab€cd€", encoding="utf-8")
    (tmp_path / "bad").write_bytes(b"ab\xe2\x82cdef")
    assert len(load_text(tmp_path / "good")) == 10
    with pytest.raises(UsageError, match="binary"):
        load_text(tmp_path / "bad")


LARGE = """
import sys, resource
from normscope.subjects.corpus import encode
from normscope.subjects.text import load_text
import torch
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024
before = anonymous()
corpus = encode(load_text(sys.argv[1], 0.1), 256)
windows, held_out = corpus.windows(8, 1024, 0), corpus.held_out.windows(8, 1024, 0)
for _ in range(50):
    assert next(windows).shape == next(held_out).shape
assert abs(corpus.unigram_entropy - 0.693147) < 1e-4, corpus.unigram_entropy
assert anonymous() - before < 40, (before, anonymous())
print(len(corpus))
"""


@pytest.mark.slow
def test_two_gib_are_not_read_into_memory(tmp_path: Path) -> None:
    """With a file of 2 GiB the process's own memory grows by less than 40 MiB."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        for _ in range(2048):
            file.write(b"ab" * 2**19)
    run_large(path, 2**31)


def test_a_file_larger_than_the_memory_it_may_take(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        for _ in range(96):
            file.write(b"ab" * 2**19)
    run_large(path, 96 * 2**20)


def run_large(path: Path, size: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == size - int(0.1 * size)


def test_places_past_what_32_bits_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nine times the same file of 2⁹ MiB, which is never read."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2**29)
    state = state_of(path)
    files = Files((state,) * 9)
    assert len(files) == 9 * 2**29
    assert files.read(2**32 + 5, 2**32 + 9).tolist() == [0] * 4
    corpus = Corpus(Text("t", files), Text("t", files), np.arange(256), "", size=len(files), validation=0.0)
    assert torch.equal(next(corpus.windows(2, 3, 0)), torch.zeros(2, 3, dtype=torch.int64))
