"""Parallel texts against pairs made by hand."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.nn.output import IGNORED
from normscope.subjects import Subject, load, parallel, untouched
from normscope.subjects import lines as lines_module
from normscope.subjects.feed import Portions
from normscope.subjects.lines import Lines
from normscope.subjects.parallel import Pairs, ParallelCorpus, encode_pairs, masked_pairs
from normscope.subjects.text import Text

OURS = "nn:encoder-decoder,depth=1,width=16,heads=2"
LINE = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=9)
PAIRS = st.lists(st.tuples(LINE, LINE), min_size=1, max_size=12)
END = st.sampled_from(["\n", "\r\n"])


def text_of(lines: list[str], end: str = "\n", last: bool = True) -> bytes:
    return (end.join(lines) + (end if last else "")).encode()


def by_hand(pairs: list[tuple[str, str]], limit: int) -> list[tuple[list[int], list[int]]]:
    """Ids of the pairs with something on both sides, each line with its newline, cut."""
    white = " \t\x0b\x0c"
    kept = [pair for pair in pairs if all(side.strip(white) for side in pair)]
    return [tuple([*side.encode(), 10][:limit] for side in pair) for pair in kept]  # type: ignore[misc]


def fed(corpus: ParallelCorpus) -> list[tuple[list[int], list[int]]]:
    """Ids of every pair of the corpus as batches hold them."""
    rows = range(corpus.begin, corpus.end)
    return [
        (corpus.source.ids(i)[: corpus.limit].tolist(), corpus.target.ids(i)[: corpus.limit].tolist())
        for i in rows
    ]


@given(PAIRS, END, st.booleans(), st.integers(1, 12), st.sampled_from([1, 5, 2**20]))
def test_pairs_are_those_by_hand(
    pairs: list[tuple[str, str]], end: str, last: bool, limit: int, chunk: int
) -> None:
    expected = by_hand(pairs, limit)
    last = last or not (pairs[-1][0] and pairs[-1][1])  # an empty last line without its end is none
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_CHUNK", chunk)
        sides = [Text("t", text_of([pair[i] for pair in pairs], end, last)) for i in (0, 1)]
        if not expected:
            with pytest.raises(UsageError, match="words on both sides"):
                Pairs.of(*sides)
            return
        corpus = encode_pairs(Pairs.of(*sides), 256, limit)
        assert fed(corpus) == expected
        assert corpus.pairs.num_blank == len(pairs) - len(expected)
        counts = Counter(itertools.chain.from_iterable(target for _, target in expected))
        assert {i: n for i, n in enumerate(corpus.counts.tolist()) if n} == counts
        total = sum(counts.values())
        entropy = -sum(n / total * math.log(n / total) for n in counts.values())
        assert corpus.unigram_entropy == pytest.approx(entropy, abs=1e-12)


@given(
    st.one_of(st.binary(max_size=40), st.text("\r\n a", max_size=20).map(str.encode)),
    st.sampled_from([1, 3, 2**20]),
)
def test_lines_are_those_of_python(data: bytes, chunk: int) -> None:
    """Split at newlines alone; what bytes.split finds after the last newline counts where it is not empty."""
    expected = data.split(b"\n")
    expected = expected if expected[-1] else expected[:-1]
    expected = [
        line.removesuffix(b"\r") if data.count(b"\n") > index else line for index, line in enumerate(expected)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "_CHUNK", chunk)
        lines = Lines.of(Text("t", data))
    assert [lines.read(i).tobytes() for i in range(len(lines))] == expected
    assert lines.is_blank().tolist() == [not line.strip() for line in expected]


def corpus_of(validation: float = 0.0, limit: int = 8, num_pairs: int = 40) -> ParallelCorpus:
    source = Text("s", text_of([f"line {i}" for i in range(num_pairs)]), validation)
    target = Text("t", text_of([str(i) * (i % 4 + 1) for i in range(num_pairs)]), validation)
    return encode_pairs(Pairs.of(source, target), 256, limit)


def test_batches_are_padded_masked_and_deterministic() -> None:
    corpus = corpus_of()
    make = lambda: masked_pairs(corpus, Portions(5, 8, 3), "ids", 0, "decoder_attention_mask")  # noqa: E731
    seen = set()
    for batch, again in itertools.islice(zip(make(), make(), strict=False), 30):
        assert isinstance(batch, dict)
        assert isinstance(again, dict)
        for key in batch:
            assert torch.equal(batch[key], again[key])
        assert all(tensor.shape == (5, 8) for tensor in batch.values())
        for row in range(5):
            ids = batch["ids"][row][batch["attention_mask"][row] == 1].tolist()
            labels = batch["labels"][row][batch["decoder_attention_mask"][row] == 1].tolist()
            assert (batch["ids"][row] != 0).sum() == len(ids)
            assert (batch["labels"][row] != IGNORED).sum() == len(labels)
            number = int(bytes(labels).decode().strip()[:1] or 0)
            assert (ids, labels) in fed(corpus)
            seen.add((tuple(ids), number))
    assert len(seen) > 30


def test_a_line_begins_its_row_and_is_cut_at_its_end() -> None:
    rows = [np.array([1, 2]), np.array([3, 4, 5, 6])]
    assert parallel._padded(rows, 3).tolist() == [[1, 2, IGNORED], [3, 4, 5]]


def test_the_length_never_changes_and_is_no_longer_than_the_longest_line() -> None:
    corpus = corpus_of(limit=64)
    shapes = {tuple(t.shape for t in batch) for batch in itertools.islice(corpus.batches(2, 0), 20)}
    assert shapes == {(torch.Size([2, 8]), torch.Size([2, 9]))}


def test_validation_keeps_the_last_pairs() -> None:
    corpus = corpus_of(validation=0.25)
    held_out = corpus.held_out
    assert held_out is not None
    assert fed(corpus) == fed(corpus_of())[:30]
    assert fed(held_out) == fed(corpus_of())[30:]
    for each in (corpus, held_out):
        drawn = {
            tuple(row[row != IGNORED].tolist())
            for ids, _ in itertools.islice(each.batches(8, 0), 60)
            for row in ids
        }
        assert drawn == {tuple(ids) for ids, _ in fed(each)}
    assert corpus.unigram_entropy != corpus_of().unigram_entropy


def test_a_small_vocabulary_is_shared_and_leaves_ids_free() -> None:
    pairs = Pairs.of(Text("s", b"aab\n"), Text("t", b"ca\n"))
    corpus = encode_pairs(pairs, 5, 8, reserved=(0,))
    assert fed(corpus) == [([1, 1, 3, 2], [4, 1, 2])]  # a 3 times, newline 2, then b and c


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    words = ["one", "two", "three", "four", "five"]
    translated = dict(zip(words, ["eins", "zwei", "drei", "vier", "fünf"], strict=True))
    generator = np.random.default_rng(0)
    rows = [generator.choice(words, size=generator.integers(1, 9)).tolist() for _ in range(80)]
    source, target = tmp_path / "a.en", tmp_path / "b.de"
    source.write_text("".join(f"{' '.join(row)}\n" for row in rows))
    target.write_text("".join(f"{' '.join(translated[word] for word in row)}\n" for row in rows))
    return source, target


def test_an_encoder_decoder_of_ours(files: tuple[Path, Path]) -> None:
    subject = load(OURS, source=files[0], target=files[1], validation=0.1, seq_len=24)
    assert "80 pairs of lines" in subject.input
    assert "cut to 24 tokens" in subject.input
    assert "the last 10 % of them" in subject.input
    assert isinstance(subject.batch, dict)
    labels = subject.batch["labels"]
    assert subject.loss().item() == pytest.approx(math.log(256), abs=0.6)
    with untouched(subject.model), torch.no_grad():
        subject.model.eval()
        before = subject.forward().logits
        changed = subject.batch["ids"].masked_fill(subject.batch["attention_mask"] == 0, 99)
        after = subject.forward({**subject.batch, "ids": changed}).logits
        longer = subject.forward({**subject.batch, "labels": labels.clone()}).logits
    assert (subject.batch["attention_mask"] == 0).any()
    assert torch.equal(before, after)  # what stands under the padding does not matter
    assert torch.equal(before, longer)
    assert subject.validation is not None
    first, second = next(subject.validation()), next(load_again(files, seed=9).validation())  # type: ignore[misc]
    assert torch.equal(first["labels"], second["labels"])  # type: ignore[index, call-overload]


def load_again(files: tuple[Path, Path], seed: int) -> Subject:
    return load(OURS, source=files[0], target=files[1], validation=0.1, seq_len=24, seed=seed)


def test_the_output_bias_is_that_of_the_targets(files: tuple[Path, Path]) -> None:
    subject = load(f"{OURS},output_bias=unigram", source=files[0], target=files[1], batch_size=32)
    assert subject.unigram_entropy is not None
    assert subject.loss().item() == pytest.approx(subject.unigram_entropy, abs=0.25)


def test_fake_tensors_take_them_too(files: tuple[Path, Path]) -> None:
    subject = load(OURS, source=files[0], target=files[1], fake=True)
    assert subject.batch["labels"].shape[0] == 4  # type: ignore[index, call-overload]


T5 = "d_model=16,d_kv=8,num_heads=2,d_ff=16,num_layers=1"
BART = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"


@pytest.mark.parametrize("spec", [f"hf:t5,{T5}", f"hf:bart,{BART}"])
def test_an_encoder_decoder_of_theirs(spec: str, files: tuple[Path, Path]) -> None:
    pytest.importorskip("transformers")
    subject = load(spec, source=files[0], target=files[1], seq_len=24, validation=0.1)
    assert "80 pairs of lines" in subject.input
    assert isinstance(subject.batch, dict)
    subject.model.eval()
    loss = subject.loss()
    logits = subject.forward().logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), subject.batch["labels"].flatten())
    torch.testing.assert_close(loss, expected)
    assert subject.unigram_entropy is not None
    pad = subject.model.config.pad_token_id
    assert (subject.batch["input_ids"][subject.batch["attention_mask"] == 0] == pad).all()  # type: ignore[union-attr]


def test_a_tokenizer_in_the_folder_makes_the_ids(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    load(f"hf:t5,{T5},vocab_size=300").model.save_pretrained(tmp_path / "model")
    words = ["[UNK]", "</s>", "one", "two", "three", "four", "five", "eins", "zwei", "drei", "vier", "fünf"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    subject = load(f"hf:{tmp_path / 'model'}", source=files[0], target=files[1], batch_size=16)
    assert "as tokens of its tokenizer.json" in subject.input
    assert isinstance(subject.batch, dict)
    counts: Counter[str] = Counter()
    for line in files[1].read_text().splitlines():
        counts.update([*line.split(), "</s>"])
    shares = [count / sum(counts.values()) for count in counts.values()]
    assert subject.unigram_entropy == pytest.approx(-sum(share * math.log(share) for share in shares))
    for ids, labels in zip(subject.batch["input_ids"], subject.batch["labels"], strict=True):
        source = [words[i] for i in ids.tolist() if i > 1]
        target = [words[i] for i in labels.tolist() if i > 1]
        assert [words.index(word) - 2 for word in source] == [words.index(word) - 7 for word in target]
        assert 1 in labels.tolist()
