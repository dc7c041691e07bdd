"""Texts → ids → batches of windows, all deterministic."""

import codecs
import functools
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normscope.errors import UsageError, describe

STANDARD_LIBRARY = "the Python standard library's source"
_DEFAULT_BYTES = 2**20
_MOST_BYTES = 2**24
_TOKENISED_BYTES = 2**18


@dataclass(frozen=True)
class Text:
    """Bytes of a text, and what to call it in the report."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Corpus:
    """A text as ids (N,) int64.

    Attributes:
        ids: the whole text.
        how: how ids came from bytes, in words.
    """

    text: Text
    ids: np.ndarray
    how: str

    def __str__(self) -> str:
        return f"{self.text.name} as {self.how}"

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the ids' frequencies in nats: what a model that ignores context can reach."""
        counts = np.bincount(self.ids)
        shares = counts[counts > 0] / len(self.ids)
        return float(-(shares * np.log(shares)).sum())

    def windows(self, num_sequences: int, length: int, seed: int) -> Iterator[Tensor]:
        """Endless batches (num_sequences, length) of stretches from random places; `seed` fixes all."""
        last = len(self.ids) - length
        if last < 0:
            raise UsageError(
                f"{self.text.name} ({len(self.ids)} tokens)",
                f"at least one sequence of {length} tokens",
                "give a longer text or a smaller --seq-len",
            )
        generator = np.random.default_rng(seed)
        offsets = np.arange(length)
        while True:
            starts = generator.integers(0, last + 1, size=num_sequences)
            yield torch.from_numpy(self.ids[starts[:, None] + offsets])


def load_text(path: Path | None = None) -> Text:
    """The text of `path`, or the standard library's source. UsageError for what is not UTF-8 text."""
    return standard_library() if path is None else _read(Path(path))


@functools.cache
def standard_library() -> Text:
    """The first MiB of the standard library's top-level modules by name: real text on every machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    for path in sorted(folder.glob("*.py")):
        data += path.read_bytes()
        if len(data) >= _DEFAULT_BYTES:
            break
    if not data:
        raise UsageError(
            f'the standard library folder "{folder}"',
            "Python source files in it",
            "give a text with --text FILE",
        )
    return Text(STANDARD_LIBRARY, bytes(data[:_DEFAULT_BYTES]))


def _read(path: Path) -> Text:
    given, do = f'text "{path}"', "give a text file with --text FILE"
    if not path.is_file():
        raise UsageError(
            f"{given} ({'not a file' if path.exists() else 'not found'})", "a file of UTF-8 text", do
        )
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError as error:
        raise UsageError(f"{given} ({error.strerror})", "a file that can be read", do) from error
    if not data.strip():
        raise UsageError(f"{given} (empty)", "a file of UTF-8 text", do)
    if b"\0" in data or not _is_utf8(data):
        raise UsageError(f"{given} (binary)", "a file of UTF-8 text", do)
    return Text(f'"{path}"', data)


def _is_utf8(data: bytes) -> bool:
    try:  # incremental: the cut at _MOST_BYTES may fall inside a character
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def tokenised(text: Text, tokenizer: Path, vocabulary: int) -> Corpus:
    """The text in the tokens of a `tokenizer.json`, for trained weights; the first quarter MiB is enough."""
    from tokenizers import Tokenizer  # comes with transformers

    try:
        encoding = Tokenizer.from_file(str(tokenizer)).encode(
            text.data[:_TOKENISED_BYTES].decode("utf-8", errors="ignore"), add_special_tokens=False
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise UsageError(
            f'"{tokenizer}" ({describe(error)})', "a tokenizer", "mend or remove the file"
        ) from error
    ids = np.array(encoding.ids, dtype=np.int64)
    if len(ids) and ids.max() >= vocabulary:
        raise UsageError(
            f'"{tokenizer}" (id {ids.max()})',
            f"ids under the vocabulary of {vocabulary}",
            "give the model's own",
        )
    return Corpus(text, ids, "tokens of its tokenizer.json")


def encode(text: Text, vocabulary: int, reserved: Collection[int] = ()) -> Corpus:
    """Byte ids for a model of `vocabulary` ids.

    With 256 or more, id = byte. With fewer, a byte's id is its rank by frequency, skipping `reserved` ids
    (padding, mask); the rarest bytes share the last one.
    """
    data = np.frombuffer(text.data, dtype=np.uint8)
    if vocabulary >= 256:
        return Corpus(text, data.astype(np.int64), "byte ids")
    free = np.array([i for i in range(vocabulary) if i not in reserved], dtype=np.int64)
    if len(free) < 2:
        raise UsageError(
            f"a vocabulary of {vocabulary}", "at least two ids for text", "give a larger vocabulary"
        )
    by_frequency = np.argsort(-np.bincount(data, minlength=256), kind="stable")
    rank = np.empty(256, dtype=np.int64)
    rank[by_frequency] = np.arange(256)
    return Corpus(text, free[np.minimum(rank, len(free) - 1)][data], "byte ids by frequency")
