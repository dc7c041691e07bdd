"""Stores of runs: what they hold of structure and recipe, and where two runs part."""

from pathlib import Path

import pytest
import torch

import normscope
from normscope.compare import Compared, Diff, Part
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
) -> str:
    """A run on random ids; from `from_step` on its weights are multiplied by 30."""
    subject = load(SMALL.format(depth=depth))
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    path = folder / f"{name}.db"
    with Monitor(subject.model, optimizer, store=path) as monitor:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / (warmup or 1))
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
    found = normscope.diff(plain, other, parts="verdict").of(Part.VERDICT)
    assert any("they part at step 16" in each.message for each in found)


def test_a_run_without_a_step_is_not_compared(plain: str, tmp_path: Path) -> None:
    found = normscope.diff(plain, store(tmp_path, "none", steps=0))
    assert all(each.how == "not" for each in found.parts)
    assert found.is_same
