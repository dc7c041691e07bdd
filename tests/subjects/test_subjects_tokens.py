"""Tokens of a tokenizer.json: the whole text for a run, the first part for a check, both described."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from normscope.errors import UsageError
from normscope.subjects import tokens
from normscope.subjects.parallel import Pairs
from normscope.subjects.text import Text, load_text
from normscope.subjects.tokens import tokenised, tokenised_pairs

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "é": 4}
VOCABULARY = 8


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"FIRST_BYTES": 24, "FIRST_PAIRS": 2, "_PIECE": 16, "_LINES": 2}.items():
        monkeypatch.setattr(tokens, name, size)


LINES = ["one two", "three one é", "two", "one one one one one", "é two three"]


def ids_of(lines: list[str]) -> list[int]:
    return [WORDS[word] for line in lines for word in line.split()]


@pytest.mark.usefixtures("small_pieces")
def test_all_of_a_text_is_tokenised_for_a_run_and_its_first_part_for_a_look(
    tokenizer: Path, tmp_path: Path
) -> None:
    body = "".join(f"{line}\n" for line in LINES)
    text = Text("it", body.encode())
    whole = tokenised(text, tokenizer, VOCABULARY, tmp_path / "kept")
    assert whole.read(0, len(whole)).tolist() == ids_of(LINES)
    assert whole.counts.tolist() == np.bincount(ids_of(LINES), minlength=VOCABULARY).tolist()
    assert str(whole) == "it as tokens of its tokenizer.json"
    part = tokenised(text, tokenizer, VOCABULARY)
    assert part.read(0, len(part)).tolist() == ids_of([body[:24]])
    assert str(part) == "it as tokens of its tokenizer.json (the first 0 KiB)"
    assert len(part) < len(whole)


def test_a_look_takes_a_quarter_of_a_mib(tokenizer: Path) -> None:
    text = Text("it", b"one two\n" * 2**16)
    assert len(tokenised(text, tokenizer, VOCABULARY)) == 2 * 2**18 // 8
    assert "(the first 256 KiB)" in str(tokenised(text, tokenizer, VOCABULARY))
    assert "first" not in str(tokenised(Text("it", b"one two\n" * 2**15), tokenizer, VOCABULARY))
    assert tokens.FIRST_PAIRS == 4096


@pytest.mark.usefixtures("small_pieces")
def test_a_line_longer_than_a_piece_is_cut_between_characters(tokenizer: Path, tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "é": 1, "ü": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.save(str(tokenizer))
    body = "aéüéü" * 9
    corpus = tokenised(Text("it", body.encode()), tokenizer, VOCABULARY, tmp_path)
    assert corpus.read(0, len(corpus)).tolist() == [0, 1, 2, 1, 2] * 9


def test_a_text_is_tokenised_once_and_again_where_it_or_the_tokenizer_is_another(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, calls = tmp_path / "kept", []
    ids = tokens._Tokenizer.ids

    def counted(reader: Any, data: np.ndarray) -> np.ndarray:
        calls.append(len(data))
        return ids(reader, data)

    monkeypatch.setattr(tokens._Tokenizer, "ids", counted)
    for body in (b"one two", b"one two", b"two one"):
        tokenised(Text("it", body), tokenizer, VOCABULARY, kept)
    assert calls == [7, 7], "the same letters in another order are another text"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    tokenised(Text("it", b"one two"), tokenizer, VOCABULARY, kept)
    assert len(calls) == 3
    assert len(list(kept.iterdir())) == 3, "nothing half written stays"


def test_what_is_cut_short_is_written_again(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(reader: Any, data: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokens._Tokenizer, "ids", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenised(Text("it", b"one two"), tokenizer, VOCABULARY, tmp_path)
    corpus = tokenised(Text("it", b"one two"), tokenizer, VOCABULARY, tmp_path)
    assert corpus.read(0, 2).tolist() == [1, 2]


@pytest.mark.usefixtures("small_pieces")
def test_pairs_are_all_there_for_a_run(tokenizer: Path, tmp_path: Path) -> None:
    for name, lines in (("a", LINES), ("b", LINES[::-1])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    pairs = Pairs.of(load_text(tmp_path / "a"), load_text(tmp_path / "b"))
    part = tokenised_pairs(pairs, tokenizer, VOCABULARY, 3)
    assert len(part.source.lengths()) == 2
    assert "the first of 5 pairs" in str(part)
    for _ in range(2):  # made, and found
        whole = tokenised_pairs(pairs, tokenizer, VOCABULARY, 3, tmp_path / "kept")
        for side, lines in ((whole.source, LINES), (whole.target, LINES[::-1])):
            assert [side.ids(n).tolist() for n in range(5)] == [ids_of([line]) for line in lines]
            assert side.lengths().tolist() == [len(line.split()) for line in lines]
            cut = [word for line in lines[1:4] for word in line.split()[:3]]
            assert side.counts(1, 4, 3).tolist() == np.bincount([WORDS[word] for word in cut]).tolist()
        assert "first" not in str(whole)
    for lengths in (tmp_path / "kept").glob("*.lengths"):
        lengths.unlink()  # killed between the two files
    again = tokenised_pairs(pairs, tokenizer, VOCABULARY, 3, tmp_path / "kept")
    assert again.target.lengths().tolist() == whole.target.lengths().tolist()


def test_ids_that_the_model_does_not_have_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\(id 3\): expected ids under the vocabulary of 3"):
        tokenised(Text("it", b"one three"), tokenizer, 3)
    assert tokenised(Text("it", b"one three"), tokenizer, 4).read(0, 2).tolist() == [1, 3]
