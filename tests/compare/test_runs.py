"""Stores of runs: what they hold of structure and recipe, and where two runs part."""

from pathlib import Path

import pytest
import torch

import normscope
from normscope.compare import Compared, Diff, Part
from normscope.compare.runs import compare_recipes
from normscope.monitor import Monitor
from normscope.subjects import load

SMALL = "nn:decoder,depth={depth},width=16,heads=2,vocab=64,context=32"
STEPS = 30


def store(
    folder: Path,
    name: str,
    *,
    depth: int = 2,
    rate: float = 1e-3,
    tokens: int = 16,
    warmup: int = 0,
    steps: int = STEPS,
    from_step: int | None = None,
    late_factor: float = 1.0,
) -> str:
    """A run on random ids; after step `from_step` its weights are multiplied by 30.

    From step 10 on the learning rate is multiplied by `late_factor`.
    """
    subject = load(SMALL.format(depth=depth))
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    path = folder / f"{name}.db"
    with Monitor(subject.model, optimizer, store=path) as monitor:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / (warmup or 1))
            optimizer.param_groups[0]["lr"] *= late_factor if step >= 10 else 1.0
            ids = torch.randint(0, 64, (2, tokens // 2), generator=generator)
            logits = subject.model(ids)[0]
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
            if step == from_step:
                with torch.no_grad():
                    for parameter in subject.model.parameters():
                        parameter *= 30
    return str(path)


def part(diff: Diff, name: Part) -> Compared:
    return next(each for each in diff.parts if each.part is name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return store(tmp_path_factory.mktemp("runs"), "plain")


def test_a_run_and_itself_have_no_difference(plain: str) -> None:
    found = normscope.diff(plain, plain)
    assert found.is_same
    assert {str(each.part): each.how for each in found.parts} == {
        "structure": "partly", "start": "not", "recipe": "partly", "function": "not", "verdict": "partly"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rate": 2e-3}, "learning-rate"),
        ({"warmup": 10}, "schedule"),
        ({"tokens": 24}, "batch-tokens"),
    ],
)
def test_the_recipe_of_two_runs(plain: str, tmp_path: Path, options: dict[str, float], name: str) -> None:
    found = normscope.diff(plain, store(tmp_path, "other", **options), parts="recipe")  # type: ignore[arg-type]
    assert [each.name for each in found.differences] == [name]


def test_blocks_that_one_run_lacks(plain: str, tmp_path: Path) -> None:
    deeper = store(tmp_path, "deeper", depth=3)
    for other in (deeper, SMALL.format(depth=3)):
        (found,) = normscope.diff(plain, other, parts="structure").differences
        assert (found.name, found.message) == ("blocks", "B has 1 block that A lacks.")
    assert normscope.diff(plain, SMALL.format(depth=2), parts="structure").is_same


def test_the_step_at_which_two_runs_part(plain: str, tmp_path: Path) -> None:
    other = store(tmp_path, "other", from_step=14)
    found = normscope.diff(plain, other, parts="verdict")
    (parting,) = [each for each in found.of(Part.VERDICT) if "they part at step 16" in each.message]
    assert parting.a < parting.b
    assert part(found, Part.VERDICT).why == (
        "of two runs, verdicts, findings and the stored figures are compared",
    )


def test_the_learning_rate_is_no_figure_at_which_runs_part(plain: str, tmp_path: Path) -> None:
    other = store(tmp_path, "other", from_step=14, late_factor=4.0)
    (parting,) = [
        each.message
        for each in normscope.diff(plain, other, parts="verdict").differences
        if "Step by step" in each.message
    ]
    assert "they part at step 16" in parting


def test_a_run_without_a_step_is_not_compared(plain: str, tmp_path: Path) -> None:
    found = normscope.diff(plain, store(tmp_path, "none", steps=0))
    assert all(each.how == "not" for each in found.parts)
    assert found.is_same
    reasons = {str(each.part): each.why[0] for each in found.parts}
    assert "a run has stored no learning rate" in reasons["recipe"]
    assert "a run has no step yet" in reasons["verdict"]


def test_a_run_and_a_model_have_no_common_recipe(plain: str) -> None:
    found = normscope.diff(plain, SMALL.format(depth=2), parts="recipe")
    assert found.differences == ()
    assert "only the learning rate is stored" in part(found, Part.RECIPE).why[0]


def test_another_type_of_numbers_is_a_difference() -> None:
    held = {"rates": {0: 1e-3}, "tokens": {0: 16.0}}
    a, b = ({**held, "types": {"dtype": kind, "weights": "float32"}} for kind in ("float32", "bfloat16"))
    (found,) = compare_recipes(a, b).differences
    assert (found.name, found.a, found.b) == ("precision", "float32", "bfloat16")
    assert found.message == "The type of numbers in the forward is float32 in A and bfloat16 in B."
    assert compare_recipes(a, {**held, "types": {"dtype": "float32"}}).differences == ()
