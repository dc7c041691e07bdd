"""Judgement of comparisons on planted differences, `benchmarks.diff.runs`."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.diff.families import Size
from benchmarks.diff.judging import is_at, judged
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case, Plant, expanded, ported
from benchmarks.diff.runs import SETS, pairs, records_of, run, summary
from normscope.compare.facts import FACTS
from normscope.compare.types import Diff, Difference, Pair, Part, Place

SIZE = Size(depth=2)
SITES = [("transformer.h.0.attn", "layers.0.attn"), ("transformer.h.1.mlp", "layers.1.mlp")]


def diff(*found: tuple[str, int]) -> Diff:
    """A comparison whose function part has differences of these names at these sites."""
    differences = tuple(
        Difference(Part.FUNCTION, name, (SITES[at],), None, None, "", is_first=number == 0)
        for number, (name, at) in enumerate(found)
    )
    empty = Place("model", "")
    return Diff("a", "b", Pair(empty, empty), (), differences)


def planted(*plants: tuple[str, str]) -> Case:
    return ported("GPT-2", SIZE, *(Plant(kind, where) for kind, where in plants))


@pytest.mark.parametrize(
    ("found", "site", "reason", "named", "num_false"),
    [
        ([("norm-eps", 0)], True, True, [True], 0),
        ([("norm-eps", 1)], False, True, [False], 1),
        ([("function", 0)], True, False, [False], 1),
        ([], False, False, [False], 0),
        ([("norm-eps", 0), ("activation", 1)], True, True, [True], 1),
    ],
)
def test_a_difference_is_right_by_its_site_and_by_its_name(
    found: Any, site: bool, reason: bool, named: list[bool], num_false: int
) -> None:
    record = judged(planted(("ε", "attention 0")), diff(*found))
    assert (record["site"], record["reason"], record["named"]) == (site, reason, named)
    assert len(record["false"]) == num_false


def test_a_second_plant_may_be_named_later() -> None:
    case = planted(("ε", "attention 0"), ("activation", "mlp 1"))
    assert judged(case, diff(("norm-eps", 0), ("activation", 1)))["named"] == [True, True]
    assert judged(case, diff(("norm-eps", 0)))["named"] == [True, False]


def test_every_difference_of_one_model_is_false() -> None:
    record = judged(Case("same", "same", "nn:decoder", "nn:decoder"), diff(("norm-eps", 0)))
    assert record["false"] == ["function: norm-eps"]


def test_places_have_modules_inside_and_not_beside() -> None:
    assert is_at("layers.1.attn.wo", ("layers.1.attn",))
    assert is_at("layers.1.attn@1", ("layers.1.attn",))
    assert not is_at("layers.10.attn", ("layers.1.attn", "layers.1"))
    assert is_at("decoder", ("last", "head"))
    assert not is_at("layers.0", ("last", "head"))


def test_places_stand_in_the_order_of_the_forward_pass() -> None:
    assert expanded("all", 2) == ["attention 0", "mlp 0", "attention 1", "mlp 1", "last"]
    assert expanded("all mlp, last", 2) == ["mlp 0", "mlp 1", "last"]


def test_there_are_enough_plants_and_pairs() -> None:
    cases = {which: list(pairs(which)) for which in SETS}
    for which in ("seen", "held-out"):
        planted = [case for case in cases[which] if case.truths]
        kinds = {truth.kind for case in planted for truth in case.truths}
        assert len(planted) >= 60
        assert len(kinds) >= 20
        assert kinds <= set(KINDS)
        assert len({case.name for case in cases[which]}) == len(cases[which])
        assert any(len(case.truths) == 2 for case in planted)
    assert len({case.architecture for case in cases["held-out"]}) >= 6
    for which in ("same", "same-held-out"):
        assert len(cases[which]) >= 30
        assert not any(case.truths for case in cases[which])


def test_a_pair_is_run_once(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    for _ in range(2):
        run(file, "seen", "LLaMA, configuration: {'rms_norm_eps'", again=False)
    (record,) = records_of(file)
    assert (record["site"], record["reason"]) == (True, True)
    assert "1 pairs, 0 errors; right site first 1 of 1" in next(summary(records_of(file)))


def test_facts_are_the_names_of_their_differences() -> None:
    names = {name.replace("_", "-") for name in FACTS}
    for kind in ("ε", "branch scale", "attention scale", "rotary base", "placement", "activation", "QK-norm"):
        assert set(KINDS[kind].names) <= names | {"qk-norm-kind"}
