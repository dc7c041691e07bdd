"""Laws of the criterion by which two runs part, and `normscope watch RUN --against GOOD`."""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from healthy_runs import SITES as BLOCKS
from healthy_runs import SITES_LAYOUT, STEP_LAYOUT, healthy_run

from normscope.cli.main import run as run_command
from normscope.monitor import Layout, Row, RunStore
from normscope.monitor.against import Parting, compare, ratio
from normscope.monitor.alarms import NOT_MEASURED, is_measured
from normscope.monitor.page import Figures
from normscope.monitor.parting import EARLIER, LASTING
from normscope.monitor.scene import Watcher
from normscope.monitor.store import Grid

Grids = dict[str, Grid]
ALIKE = 60
"""Two seeds this far apart make runs of the same settings."""
PAIRS = [(0, 60), (1, 61), (2, 62), (3, 63), (4, 64), (5, 65), (7, 67), (11, 71), (14, 74), (29, 89)]


@functools.cache
def healthy(seed: int) -> Mapping[str, Grid]:
    found: Grids = {}
    rows = list(healthy_run(seed))
    for layout in (STEP_LAYOUT, SITES_LAYOUT):
        mine = [(step, values) for step, of, values in rows if of == layout]
        steps, values = np.array([step for step, _ in mine]), np.array([values for _, values in mine])
        for quantity in dict.fromkeys(name for name, _ in layout):
            columns = [i for i, (name, _) in enumerate(layout) if name == quantity]
            part = np.ascontiguousarray(values[:, columns])
            found[quantity] = Grid(steps, tuple(layout[i][1] for i in columns), part, is_measured(part))
    return found


def changed(run: Mapping[str, Grid], quantity: str, step: int, site: str, factor: float) -> Grids:
    """The run, with a quantity times a factor from a step on, at a site and all later ones."""
    grid = run[quantity]
    values = grid.values.copy()
    values[grid.steps >= step, grid.sites.index(site) :] *= factor
    return {**run, quantity: replace(grid, values=values)}


def cut(run: Mapping[str, Grid], last: int) -> Grids:
    def shorter(grid: Grid) -> Grid:
        kept = grid.steps <= last
        return Grid(grid.steps[kept], grid.sites, grid.values[kept], grid.present[kept])

    return {name: shorter(grid) for name, grid in run.items()}


def place(found: Parting) -> tuple[str, str]:
    return found.where[0].quantity, found.where[0].site


# Laws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_a_run_never_parts_from_itself(seed: int) -> None:
    found = compare(healthy(seed), healthy(seed))
    assert (found.state, found.where, found.from_start, found.step) == ("together", (), (), None)
    skipped = int(healthy(seed)["skipped"].values.sum())
    assert found.sentence == (
        f"They do not part in {2000 - skipped} common steps. They are equal to rounding."
    )
    assert found.equal_until == 2000


@pytest.mark.parametrize("seed", [0, 3])
def test_runs_that_drift_apart_from_rounding_do_not_part(seed: int) -> None:
    """The same seed on two machines: the difference grows from 1e-7 to that of two seeds, and stays."""
    rng = np.random.default_rng(seed)

    def drifted(grid: Grid) -> Grid:
        size = np.minimum(0.1, 1e-7 * np.exp(grid.steps / 60.0))[:, None]
        return replace(grid, values=grid.values * (1 + size * rng.normal(size=grid.values.shape)))

    run = {name: grid if name in ("lr", "skipped") else drifted(grid) for name, grid in healthy(seed).items()}
    found = compare(run, healthy(seed))
    assert found.state == "together"
    assert found.equal_until is not None
    assert 60 < found.equal_until < 600, "1e-7 exp(t / 60) of a normal number passes 1e-5"
    assert found.sentence.endswith(f" They are equal to rounding until step {found.equal_until}.")


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_rounding_is_relative(size: float) -> None:
    steps, known = np.arange(1, 51), np.ones((50, 1), dtype=bool)

    def grids(change: float) -> Grids:
        values = np.full((50, 1), size)
        values[30] *= 1 + change
        return {"loss": Grid(steps, ("",), values, known)}

    assert compare(grids(3e-6), grids(0.0)).equal_until == 50
    assert compare(grids(3e-5), grids(0.0)).equal_until == 30


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_healthy_runs_with_different_seeds_do_not_part(pair: tuple[int, int]) -> None:
    for run, good in (pair, pair[::-1]):
        found = compare(healthy(run), healthy(good))
        assert found.sentence.startswith("They do not part in ")
        assert found.common > 1950
        assert found.equal_until is None
        zeros = {each.quantity for each in found.from_start}  # other matrices begin with zeros
        assert zeros <= {"weight/norm"}


@pytest.mark.parametrize("same_seed", [True, False], ids=["same seed", "other seed"])
@pytest.mark.parametrize("step", [101, 640, 1500])
@pytest.mark.parametrize(
    ("quantity", "site", "factor"),
    [
        ("stream/rms", BLOCKS[0], 4.0),
        ("stream/rms", BLOCKS[7], 4.0),
        ("stream/rms", BLOCKS[7], 0.2),
        ("loss", "", 2.0),
        ("lr", "", 0.5),
        ("gradient/norm", "", 30.0),
        ("stream/rms", BLOCKS[11], 1e30),
    ],
)
def test_a_planted_change_is_where_they_part(
    quantity: str, site: str, factor: float, step: int, same_seed: bool
) -> None:
    good = healthy(0 if same_seed else ALIKE)
    found = compare(changed(healthy(0), quantity, step, site, factor), good, "good.db")
    assert found.state == "parted"
    assert found.step is not None
    assert step <= found.step < step + LASTING
    assert place(found) == (quantity, site)
    where = found.where[0]
    assert where.ratio == pytest.approx(factor, rel=0.6)
    assert where.before == pytest.approx(1.0, rel=0.3)
    assert found.sentence.startswith(f"They part at step {found.step}: {where.name} is ")
    assert found.equal_until == (step - 1 if same_seed else None)
    assert "times that of good.db (" in found.sentence


def test_a_change_of_sparse_rows_is_found_at_the_next_row() -> None:
    found = compare(changed(healthy(0), "attention/max-logit", 801, BLOCKS[5], 20.0), healthy(ALIKE))
    assert (found.step, place(found)) == (810, ("attention/max-logit", BLOCKS[5]))


def test_the_forward_comes_before_the_loss_and_the_loss_before_the_gradient() -> None:
    run = healthy(0)
    order = [
        ("gradient/block", BLOCKS[4], 100.0),
        ("loss", "", 3.0),
        ("stream/rms", BLOCKS[9], 5.0),
        ("branch/update-ratio", f"{BLOCKS[6]}.mlp", 50.0),
    ]
    for quantity, site, factor in order:
        run = changed(run, quantity, 700, site, factor)
        assert place(compare(run, healthy(ALIKE))) == (quantity, site)
    found = compare(run, healthy(ALIKE))
    assert [each.site for each in found.where[:2]] == [f"{BLOCKS[6]}.mlp", f"{BLOCKS[7]}.mlp"]
    earlier = changed(run, "gradient/norm", 690, "", 100.0)
    assert place(compare(earlier, healthy(ALIKE))) == ("gradient/norm", ""), "an earlier step comes first"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 5, 640, 2000])
def test_a_value_that_is_not_finite_parts_at_once(bad: float, step: int) -> None:
    grid = healthy(0)["stream/rms"]
    values = grid.values.copy()
    values[step - 1, 3:] = bad
    broken = {**healthy(0), "stream/rms": replace(grid, values=values)}
    for run, good in ((broken, healthy(ALIKE)), (healthy(ALIKE), broken)):
        found = compare(run, good)
        assert (found.step, place(found)) == (step, ("stream/rms", BLOCKS[3]))
        assert len(found.where) == 9
        assert f"is {bad}" in found.sentence or f"and {bad} in the other run" in found.sentence
    assert compare(broken, broken).state == "together"


def test_an_explosion_that_ends_in_nan_parts_where_it_began() -> None:
    run = changed(healthy(0), "stream/rms", 997, BLOCKS[2], 50.0)
    values = run["stream/rms"].values
    values[999:, 2:] = math.nan
    assert compare(run, healthy(ALIKE)).step == 997


def test_a_spike_that_passes_is_no_parting() -> None:
    grid = healthy(0)["loss"]
    values = grid.values.copy()
    values[500 : 500 + LASTING - 1] *= 5
    assert compare({**healthy(0), "loss": replace(grid, values=values)}, healthy(ALIKE)).state == "together"
    values[500 + LASTING - 1] *= 5
    assert compare({**healthy(0), "loss": replace(grid, values=values)}, healthy(ALIKE)).step == 501


def test_a_value_that_was_not_measured_is_no_difference() -> None:
    grid = healthy(0)["stream/rms"]
    values, present = grid.values.copy(), grid.present.copy()
    values[300:400], present[300:400] = NOT_MEASURED, False
    run = {**healthy(0), "stream/rms": Grid(grid.steps, grid.sites, values, present)}
    assert compare(run, healthy(ALIKE)).state == "together"
    assert compare(healthy(ALIKE), run).state == "together"


def test_a_parting_does_not_move_while_the_run_goes_on() -> None:
    run = changed(healthy(0), "stream/rms", 700, BLOCKS[5], 4.0)
    assert compare(cut(run, 699), healthy(ALIKE)).state == "together"
    found = [compare(cut(run, last), healthy(ALIKE)) for last in (710, 800, 1500, 2000)]
    assert {(each.step, place(each)) for each in found} == {(found[0].step, ("stream/rms", BLOCKS[5]))}


def test_a_difference_from_the_start_is_said_and_is_no_parting() -> None:
    found = compare(changed(healthy(0), "stream/rms", 0, BLOCKS[0], 8.0), healthy(ALIKE), "good.db")
    assert found.state == "together"
    assert {each.site for each in found.from_start if each.quantity == "stream/rms"} == set(BLOCKS)
    assert "From the first steps on, stream/rms at blocks.0 is 8" in found.sentence
    assert f"times that of good.db, and {len(found.from_start) - 1} other series differ." in found.sentence


def test_too_little_in_common_is_undecided() -> None:
    few = compare(cut(healthy(0), EARLIER + LASTING - 1), healthy(ALIKE))
    assert few.state == "undecided"
    assert few.sentence == "Undecided: they have 14 rows in common, and at least 15 are needed."
    assert compare(cut(healthy(0), EARLIER + LASTING), healthy(ALIKE)).state == "together"
    other = {name: replace(grid, steps=grid.steps + 10_000) for name, grid in healthy(0).items()}
    assert compare(other, healthy(ALIKE)).sentence == "Undecided: they have no step in common."
    assert compare({}, healthy(0)).sentence == "Undecided: they have no quantity in common."


def test_quantities_that_say_nothing_of_the_model_part_nobody() -> None:
    steps = np.arange(1, 101)
    slow = np.where(steps > 50, 9.0, 1.0)[:, None]
    for quantity, state in (("seconds", "undecided"), ("tokens", "undecided"), ("stream/rms", "parted")):
        run, good = ({quantity: Grid(steps, ("",), values, values > 0)} for values in (slow, slow * 0 + 1))
        assert compare(run, good).state == state


def test_shares_are_compared_by_difference() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(1, 201)
    noise = (rng.random((2, 200, 1)) < 0.1) * 0.02  # mostly 0: a ratio would be infinite
    late = np.where(steps > 150, 0.4, 0.0)[:, None]
    known = np.ones((200, 1), dtype=bool)

    def grids(values: np.ndarray) -> Grids:
        return {"update/lost": Grid(steps, ("norm",), values, known)}

    assert compare(grids(noise[0]), grids(noise[1])).state == "together"
    found = compare(grids(noise[0] + late), grids(noise[1]), "good.db")
    assert found.step == 151
    assert "update/lost at norm is 0.4 above that of good.db (0 before)" in found.sentence


# Ratios -------------------------------------------------------------------------------------------------


def test_the_ratio_is_on_common_steps_and_sites() -> None:
    run = Grid(np.array([1, 2, 3, 5]), ("a", "b", "c"), np.full((4, 3), 8.0), np.ones((4, 3), bool))
    run.values[1, 0], run.values[2, 1] = math.nan, 0.0
    good = Grid(np.array([2, 3, 4, 5]), ("c", "b", "a"), np.full((4, 3), 2.0), np.ones((4, 3), bool))
    good.present[3, 0] = False
    found = ratio(run, good, "stream/rms")
    assert (found.steps.tolist(), found.sites) == ([2, 3, 5], ("a", "b", "c"))
    assert found.values[0].tolist()[1:] == [2.0, 2.0]
    assert math.isnan(found.values[0, 0])
    assert found.present.tolist() == [[True, True, True], [True, True, True], [True, True, False]]
    assert found.values[1, 1] < -1000, "0 is smaller than everything, and finite"
    back = ratio(good, run, "stream/rms")
    assert back.values[0].tolist()[0] == -2.0


# The command --------------------------------------------------------------------------------------------

LAYOUT: Layout = (("loss", ""), ("stream/rms", "blocks.0"), ("stream/rms", "blocks.1"))


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    for name in ("run.db", "good.db"):
        values = np.exp(0.02 * rng.normal(size=(120, 3)))
        if name == "run.db":
            values[79:, 2] *= 4
        with RunStore(tmp_path / name) as store:
            store.declare("step", LAYOUT)
            store.add([Row(i, 0, 1.0, "step", row) for i, row in enumerate(values, 1)])
    return tmp_path / "run.db", tmp_path / "good.db"


def test_a_scene_has_the_other_run(stores: tuple[Path, Path]) -> None:
    watcher = Watcher(stores[0], against=stores[1])
    now = watcher.look()
    assert now.against is not None
    assert (now.against.last_step, now.against.parting.step) == (120, 80)
    assert now.against.loss is not None
    assert now.against.heat is not None
    assert now.against.heat.values[-1] == pytest.approx([0.0, 2.0], abs=0.3)
    with RunStore(stores[0], resume=True) as store:
        store.declare("step", LAYOUT)
        store.add([Row(70, 0, 1.0, "step", np.ones(3))])
    again = watcher.look().against
    assert again is not None
    assert (again.parting.state, again.parting.common) == ("together", 70)


def test_json_says_where_they_part(stores: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["watch", str(stores[0]), "--against", str(stores[1]), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    parting = document["against"]["parting"]
    assert (parting["state"], parting["step"], parting["where"][0]["site"]) == ("parted", 80, "blocks.1")
    assert run_command(["watch", str(stores[0]), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"] is None


def test_the_picture_shows_both(stores: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["watch", str(stores[0]), "--against", str(stores[1])]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "against good.db They part at step 80: stream/rms at blocks.1 is 4" in words
    assert "loss of good.db steps 1 to 120" in words
    assert "stream/rms, ratio to good.db steps 1 to 120" in words
    last = next(line for line in out.splitlines() if line.startswith("blocks.1"))
    assert last.rstrip().endswith("█")


def test_two_models_without_a_common_site_are_compared_by_their_loss(
    stores: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = {"other": (("loss", ""), ("stream/rms", "h.0")), "apart": (("stream/rms", "h.0"),)}
    for name, layout in layouts.items():
        with RunStore(tmp_path / f"{name}.db") as store:
            store.declare("step", layout)
            store.add([Row(i, 0, 1.0, "step", np.ones(len(layout))) for i in range(1, 121)])
    for name, said in (("other", "do not part in 120 common steps"), ("apart", "have no quantity in common")):
        command = ["watch", str(stores[0]), "--against", str(tmp_path / f"{name}.db")]
        for more in ([], ["--format", "json"]):
            assert run_command([*command, *more]) == 0
            assert said in " ".join(capsys.readouterr().out.split())
        on_page = Figures(stores[0], against=tmp_path / f"{name}.db").answer({})["against"]
        assert (on_page["heat"], on_page["sites"]) == (None, [])
        assert said in on_page["parting"]["sentence"]


def test_a_wrong_other_run_is_one_line(stores: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for good, said in (("none.db", "not found"), ("run.db", "the same store")):
        assert run_command(["watch", str(stores[0]), "--against", str(stores[0].with_name(good))]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err
