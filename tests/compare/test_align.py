"""Alignment of two structures: insertions and deletions are one difference each, whatever else differs."""

import pytest

from normscope.compare.align import align, regrouped
from normscope.compare.differences import compare_structures
from normscope.compare.types import Difference, Pair, Place

DEPTH = 6


def branch(kind: str, number: int, **facts: object) -> Place:
    return Place("branch", f"layers.{number}.{kind}", {"kind": kind, "placement": "pre", **facts})


def block(number: int, kinds: tuple[str, ...] = ("attention", "feed-forward"), **facts: object) -> Place:
    branches = tuple(branch(kind, number, **facts) for kind in kinds)
    return Place("block", f"layers.{number}", {}, branches)


def model(*blocks: Place) -> Place:
    return Place("model", "", {}, (Place("stack", "decoder", {"role": "decoder"}, blocks),))


def tower(depth: int = DEPTH, **facts: object) -> Place:
    return model(*(block(number, **facts) for number in range(depth)))


def differences(a: Place, b: Place) -> tuple[Difference, ...]:
    return compare_structures(align(a, b))


def blocks_of(rows: Pair) -> list[tuple[str | None, str | None]]:
    return [
        (pair.a.name if pair.a else None, pair.b.name if pair.b else None)
        for stack in rows.parts
        for pair in stack.parts
    ]


def test_a_structure_and_itself_do_not_differ() -> None:
    assert differences(tower(), tower()) == ()


@pytest.mark.parametrize("missing", range(DEPTH))
def test_a_deleted_block_is_one_difference_wherever_it_is(missing: int) -> None:
    whole = model(*(block(number, attention_scale=0.1 * (1 + number)) for number in range(DEPTH)))
    blocks = whole.parts[0].parts
    part = model(*blocks[:missing], *blocks[missing + 1 :])

    (deleted,) = differences(whole, part)
    assert (deleted.name, deleted.sites) == ("blocks", ((f"layers.{missing}", None),))
    (inserted,) = differences(part, whole)
    assert (inserted.name, inserted.sites) == ("blocks", ((None, f"layers.{missing}"),))


def test_of_equal_blocks_the_last_ones_are_missing() -> None:
    (found,) = differences(tower(6), tower(4))
    assert found.sites == (("layers.4", None), ("layers.5", None))
    assert found.message == "A has 2 blocks that B lacks."


def test_a_fact_of_every_block_is_one_difference_beside_a_missing_block() -> None:
    found = differences(tower(6, norm_eps=1e-5), tower(5, norm_eps=1e-6))
    assert [each.name for each in found] == ["norm-eps", "blocks"]
    assert len(found[0].sites) == 10
    assert found[0].message == "The norms' ε is 1e-05 in A and 1e-06 in B."


def test_a_missing_branch_is_one_difference() -> None:
    both = tower()
    without = model(*(block(number, ("feed-forward",)) for number in range(DEPTH)))
    (found,) = differences(both, without)
    assert found.name == "branch"
    assert found.sites == tuple((f"layers.{number}.attention", None) for number in range(DEPTH))


def test_another_kind_of_mixer_is_paired_with_the_attention() -> None:
    other = model(*(block(number, ("other", "feed-forward")) for number in range(DEPTH)))
    (found,) = differences(tower(), other)
    assert (found.name, found.a, found.b, len(found.sites)) == ("kind", "attention", "other", DEPTH)


def test_a_difference_in_one_block_stays_there() -> None:
    blocks = tower().parts[0].parts
    (found,) = differences(tower(), model(*blocks[:3], block(3, placement="post"), *blocks[4:]))
    assert [a for a, _ in found.sites] == ["layers.3.attention", "layers.3.feed-forward"]


def test_a_flat_list_of_sublayers_is_the_same_structure() -> None:
    flat = model(*(block(n, (("attention", "feed-forward")[n % 2],)) for n in range(2 * DEPTH)))
    assert differences(tower(), flat) == differences(flat, tower()) == ()
    assert blocks_of(align(tower(), flat))[0] == ("layers.0", "layers.0 + layers.1")


def test_only_joined_blocks_that_match_are_regrouped() -> None:
    odd = Place("stack", "decoder", {}, (block(0, ("other",)), block(1, ("attention",))))
    assert regrouped(odd, like=tower().parts[0]) == odd


def test_a_fact_that_one_side_does_not_know_is_no_difference() -> None:
    assert differences(tower(norm_eps=1e-5), tower()) == ()
