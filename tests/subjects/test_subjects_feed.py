"""Batches: each can be made without those before it; a user's iterator needs bounded memory."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope.errors import BatchesError, UsageError
from normscope.interrupts import Ended
from normscope.subjects import Subject, feed, load, make_subject
from normscope.subjects.corpus import encode
from normscope.subjects.feed import (
    BLOCK,
    Portions,
    Replay,
    fingerprint,
    num_bytes,
    tensors_in,
)
from normscope.subjects.repeats import repeated_after
from normscope.subjects.subject import LOSS_INPUTS, Batch
from normscope.subjects.text import load_text

SMALL = "depth=1,width=8,heads=1,vocab=64,context=32"
IMAGES = "nn:vision,depth=1,width=8,heads=1,image=8,patch=4"
SEEN = {"batch_size": 2, "seq_len": 8}
SHORT_BLOCK = 3


def pairs(folder: Path) -> dict[str, Path]:
    """Two files of lines that belong together."""
    for name, word in (("source", "one"), ("target", "eins")):
        lines = "".join(f"{word} {number}\n" for number in range(40))
        (folder / name).write_text(lines, encoding="utf-8")
    return {"source": folder / "source", "target": folder / "target"}


class Map(nn.Module):
    """A module that takes floats."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x)


def numbers(count: int) -> Iterator[torch.Tensor]:
    """Batches that hold their index."""
    return (torch.full((2, 4), float(n)) for n in range(count))


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "next token": lambda _: load(f"nn:decoder,{SMALL}", **SEEN),
    "masked": lambda _: load(f"nn:encoder,{SMALL}", **SEEN),
    "continued": lambda _: load(f"nn:encoder-decoder,{SMALL}", **SEEN),
    "pairs": lambda folder: load(f"nn:encoder-decoder,{SMALL}", **SEEN, **pairs(folder)),
    "noise and labels": lambda _: load(IMAGES, **SEEN),
    "digits": lambda _: load(IMAGES, images="digits", **SEEN),
    "bare floats": lambda _: make_subject(Map(), **SEEN),
    "bare ids": lambda _: make_subject(nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)), **SEEN),
    "an iterator that ends": lambda _: make_subject(Map(), numbers(5)),
    "a long iterator": lambda _: make_subject(Map(), numbers(100)),
    "a list": lambda _: make_subject(Map(), list(numbers(5))),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_batches_from_any_number_on_are_those_that_come_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "BLOCK", SHORT_BLOCK)
    subject = SUBJECTS[name](tmp_path)
    whole = [fingerprint([batch]) for batch in itertools.islice(subject.batches(), 10)]
    assert len(set(whole)) >= 5
    for start in (0, 1, SHORT_BLOCK - 1, SHORT_BLOCK, SHORT_BLOCK + 1, 2 * SHORT_BLOCK):
        part = [fingerprint([batch]) for batch in itertools.islice(subject.batches(start), 4)]
        assert part == whole[start : start + 4], start


def test_the_first_block_is_drawn_from_the_seed_itself_and_no_two_blocks_are_alike() -> None:
    subject = load(f"nn:decoder,{SMALL}", seed=3, **SEEN)
    windows = encode(load_text(), 64).windows(2, 9, 3)
    for batch, ids in zip(itertools.islice(subject.batches(), 5), windows, strict=False):
        assert torch.equal(tensors_in(batch)[0], ids[:, :-1])
    portions = Portions(2, 8, 3)
    seeds = [portions.of_block(block).seed for block in range(100)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 100
    assert portions.of_block(1) != Portions(2, 8, 4).of_block(1)


def test_a_batch_far_ahead_costs_a_block_and_no_more() -> None:
    drawn = 0

    def counted(portions: Portions) -> Iterator[Batch]:
        nonlocal drawn
        for _ in itertools.count():
            drawn += 1
            yield torch.zeros(1)

    next(feed.in_blocks(counted, Portions(1, 1, 0))(10**9 + 5))
    assert drawn <= BLOCK
    assert BLOCK == 1024, "another size gives other batches to every run of more than 1,000 steps"


def test_an_endless_iterator_is_kept_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KEPT_BYTES", 3 * num_bytes(torch.zeros(2, 4)))
    alive = 0

    class Counted:
        """A batch that counts its living instances."""

        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal alive
            alive += 1
            self.tensor = tensor

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def endless() -> Iterator[tuple[torch.Tensor, Counted]]:
        for n in itertools.count():
            tensor = torch.full((2, 4), float(n))
            yield tensor, Counted(tensor)

    def firsts(batches: Iterator[Batch], count: int) -> list[int]:
        return [int(batch[0][0, 0]) for batch in itertools.islice(batches, count)]

    replay = Replay(endless())
    assert replay.notes == ("only the iterator's first 3 batches are kept: a second pass repeats them",)
    assert firsts(replay(), 200) == list(range(200))
    assert alive <= 3 + 2, "those that are kept, and what the loops hold"
    assert firsts(replay(), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert firsts(replay(200), 2) == [200, 201], "the pass that is furthest goes on"


def test_a_generator_that_raised_has_not_ended() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield from numbers(3)
        raise OSError("disk gone")

    replay = Replay(broken())
    for _ in range(2):
        batches = replay()
        assert [int(next(batches)[0, 0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(
            BatchesError, match=r"^batch 4 of the batches raised OSError: disk gone:"
        ) as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Ended(15), MemoryError()])
def test_what_is_no_error_of_the_batches_passes(stop: BaseException) -> None:
    def stopped() -> Iterator[torch.Tensor]:
        yield from numbers(1)
        raise stop

    with pytest.raises(type(stop)) as caught:
        list(Replay(stopped())())
    assert caught.value is stop


EMPTY = torch.zeros(0, 64)


@pytest.mark.parametrize(
    ("batch", "which"),
    [
        (EMPTY, "its first tensor"),
        ((EMPTY, torch.ones(2)), "its first tensor"),
        ({LOSS_INPUTS: torch.ones(2), "x": EMPTY}, '"x"'),
    ],
)
def test_an_empty_batch_is_one_line(batch: Batch, which: str) -> None:
    said = rf"^batch 1 of the batches is empty: {which} has shape \(0, 64\): expected at least one value"
    with pytest.raises(UsageError, match=said):
        make_subject(Map(), batch)
    replay = Replay(iter([(torch.ones(2, 4), EMPTY), {"x": torch.ones(2, 4), LOSS_INPUTS: EMPTY}, batch]))
    for _ in range(2):
        batches = replay()
        assert len([next(batches), next(batches)]) == 2, "what is not read first may be empty"
        with pytest.raises(BatchesError, match="batch 3"):
            next(batches)


def test_a_loader_that_cannot_begin_or_exits_is_one_line() -> None:
    class Broken:
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise FileNotFoundError("no /data")

    with pytest.raises(UsageError, match=r"^batch 1 of the batches raised FileNotFoundError: no /data:"):
        make_subject(Map(), Broken())

    def exits() -> Iterator[torch.Tensor]:
        sys.exit("no /data")
        yield

    with pytest.raises(UsageError, match=r"^batch 1 of the batches raised SystemExit: no /data:"):
        make_subject(Map(), exits())


@pytest.mark.parametrize("is_list", [False, True], ids=["iterator", "list, which the caller holds"])
def test_a_source_that_ends_begins_again(is_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "KEPT_BYTES", 2 * num_bytes(torch.zeros(2, 4)))
    replay = Replay(list(numbers(5)) if is_list else numbers(5))
    assert len(replay.notes) == (not is_list)
    found = [int(batch[0, 0]) for batch in itertools.islice(replay(), 8)]
    assert found == ([0, 1, 2, 3, 4, 0, 1, 2] if is_list else [0, 1, 2, 3, 4, 1, 0, 1])


def test_small_batches_of_an_iterator_come_without_a_note() -> None:
    assert not any("iterator" in note for note in make_subject(Map(), numbers(5)).notes)


def test_a_fingerprint_is_of_the_values_in_their_order() -> None:
    one, other = torch.arange(4), torch.arange(4) + 1
    same = fingerprint([{"a": one, "b": (other,)}])
    assert same == fingerprint([{"a": one.clone(), "b": [other.clone()]}])
    assert same == fingerprint([one, other])
    last = torch.tensor([1, 2, 3, 5])
    for batches in ([{"a": other, "b": one}], [one], [{"a": one, "b": other + 1}], [one, last]):
        assert fingerprint(batches) != same


@pytest.mark.parametrize(
    ("different", "most", "period"), [(1, 36, 1), (8, 36, 8), (36, 36, None), (40, 36, None)]
)
def test_batches_that_come_again_are_found(different: int, most: int, period: int | None) -> None:
    batches = [torch.full((2, 3), k) for k in range(different)]
    assert repeated_after(Replay(iter(batches)), most) == period
    assert repeated_after(lambda: iter(batches), most) == period, "batches that end begin again"


def test_batches_without_tensors_are_not_said_to_repeat() -> None:
    assert repeated_after(lambda: iter([["a"], ["b"]] * 9), 36) is None
