"""What the kept figures of `measure_trained.py` say; `pytest -m slow` measures them anew."""

import json
from collections.abc import Callable

import measure_trained
import pytest
import torch
from measure_trained import LADDER, MEASURES, Found

MARGIN = 0.1
"""Nats under the byte frequencies from which on a run trains."""


def trains(found: Found, name: str) -> list[bool]:
    """Of each seed."""
    return [float(end) <= -MARGIN for end in found[name]]


def b4_is_refuted_and_deep_post_ln_fails(found: Found) -> bool:
    shallow = trains(found, "post, 4 blocks, no warm-up") + trains(found, "pre, 12 blocks, no warm-up")
    return all(shallow) and not any(trains(found, "post, 12 blocks, no warm-up"))


def b5_is_refuted(found: Found) -> bool:
    return all(trains(found, "post, 12 blocks, N(0, 0.02²)"))


def c10_needs_the_norm_before_the_branch(found: Found) -> bool:
    rungs = {p: sum(all(trains(found, f"{p}, {lr:g}")) for lr in LADDER) for p in ("pre", "post", "none")}
    return rungs["pre"] > rungs["none"] > rungs["post"]


def c11_holds_for_both_and_not_for_norms_alone(found: Found) -> bool:
    pre, none, plain = (sum(map(float, found[name])) for name in ("pre", "none", "plain"))
    return pre <= 0.7 * plain and pre > 0.7 * none


def c18_a_final_norm_saves_nothing(found: Found) -> bool:
    saved = [b - a for a, b in zip(found["with"], found["without"], strict=True)]
    return max(saved) < 0.05


def c26_depends_on_the_optimiser(found: Found) -> bool:
    return (
        not any(trains(found, "adamw, post, 8 blocks, clipped"))
        and not any(trains(found, "sgd, no norms, 6 blocks"))
        and all(trains(found, "sgd, no norms, 6 blocks, clipped"))
    )


def c27_moving_norms_costs_half_of_what_was_learnt(found: Found) -> bool:
    return all(
        after - before >= -before / 2 for before, after in zip(found["trained"], found["moved"], strict=True)
    )


def c32_layer_norm_is_no_point_ahead(found: Found) -> bool:
    return sum(a - b for a, b in zip(found["ln"], found["bn"], strict=True)) / len(found["ln"]) < 1


SAID: dict[str, Callable[[Found], bool]] = {
    "B4": b4_is_refuted_and_deep_post_ln_fails,
    "B5": b5_is_refuted,
    "C10": c10_needs_the_norm_before_the_branch,
    "C11": c11_holds_for_both_and_not_for_norms_alone,
    "C18": c18_a_final_norm_saves_nothing,
    "C26": c26_depends_on_the_optimiser,
    "C27": c27_moving_norms_costs_half_of_what_was_learnt,
    "C32": c32_layer_norm_is_no_point_ahead,
}


@pytest.mark.parametrize("id", SAID)
def test_kept_figures_say_what_the_claims_say(id):
    kept = json.loads(measure_trained.KEPT.read_text(encoding="utf-8"))
    assert SAID[id](kept[id]), kept[id]


@pytest.mark.slow
@pytest.mark.parametrize("id", SAID)
def test_figures_measured_anew_say_the_same(id):
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    found = MEASURES[id]()
    assert SAID[id](found), found
