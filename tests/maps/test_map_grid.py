"""Grids: the grammar, the cells, and errors."""

import itertools
import subprocess
import sys

import pytest
import torch
from small_maps import small_base, small_grid

from normscope.errors import UsageError
from normscope.maps import Cell, Grid
from normscope.maps.crews import MOST_NUMBERS, crews, measured_stack
from normscope.maps.grid import parameters_of, spell, with_options
from normscope.option_values import counts, rates, seeds
from normscope.subjects.spec import parse


def test_a_range_goes_up_by_one_factor() -> None:
    found = rates("1e-4:3e-2:8")
    assert len(found) == 8
    assert (found[0], found[-1]) == (1e-4, 3e-2)
    ratios = [after / before for before, after in itertools.pairwise(found)]
    assert max(ratios) / min(ratios) < 1.02  # three digits are kept
    assert all(float(f"{rate:.3g}") == rate for rate in found)


def test_lists_and_ranges_mix() -> None:
    assert rates("1e-5, 1e-3:1e-1:3") == [1e-5, 1e-3, 1e-2, 1e-1]
    assert counts("--depths", "4,8") == [4, 8]
    assert seeds("3") == [0, 1, 2]
    assert seeds("0,7") == [0, 7]
    assert seeds("7,") == [7]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (rates, "0"), (rates, "-1e-3"), (rates, "nan"), (rates, "inf"), (rates, "x"), (rates, ""),
        (rates, "1e-3:1e-1"), (rates, "1e-3:1e-1:1"), (rates, "1e-3:0:4"), (rates, "1e-3:1e-1:2.5"),
        (lambda text: counts("--depths", text, least=1), "0"), (lambda text: counts("--warmups", text), "-1"),
        (seeds, "0"), (seeds, "two"), (seeds, "9999999999"), (rates, "1e-4:1e-2:9999999999"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_on_one_line(read, text) -> None:
    with pytest.raises(UsageError) as error:
        read(text)
    assert "\n" not in str(error.value)


def test_every_combination_is_a_cell_once() -> None:
    lrs = [1e-3, 3e-3, 1e-2, 3e-2, 1e-3]
    axes = {"depths": [1, 2, 1], "warmups": [0, 5, 0], "seeds": [0, 1, 1], "schemes": ["post", "pre", "post"]}
    grid = small_grid(lrs=lrs, **axes)
    found = [(c.scheme, c.depth, c.lr, c.warmup, c.seed) for c in grid.cells]
    assert sorted(found) == sorted(
        itertools.product(["post", "pre"], [1, 2], [1e-3, 3e-3, 1e-2, 3e-2], [0, 5], [0, 1])
    )
    assert len({cell.key for cell in grid.cells}) == len(found)
    assert len({cell.shape for cell in grid.cells}) == 4


def test_a_key_depends_on_the_run_alone_and_on_all_of_it() -> None:
    config = small_base()
    assert Cell(config).key == Cell(small_base()).key
    other = {"lr": 0.1, "seed": 3, "steps": 9, "model": "nn:decoder,width=16", "batch_size": 3, "clip": 1.0}
    assert len({Cell(config.replace(**{k: v})).key for k, v in other.items()} | {Cell(config).key}) == 7


def test_a_key_is_the_same_in_another_process() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from small_maps import small_grid;"
        "print(small_grid().cells[0].key)"
    )
    folder = str(__import__("pathlib").Path(__file__).parent)
    said = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == small_grid().cells[0].key


def test_a_model_has_one_spelling() -> None:
    one = small_grid(base=small_base("nn:decoder,width=8,heads=1")).models
    assert one == small_grid(base=small_base("nn:decoder,heads=1,width=8")).models
    options = {"scheme": "post", "output_bias": "unigram", "qk_norm": None, "dropout": 0.5, "tie": True}
    assert parse(spell("decoder", options)).options == {k: v for k, v in options.items() if v is not None}
    assert with_options("nn:decoder", width=8, heads=None) == "nn:decoder,width=8"


@pytest.mark.parametrize(
    ("axes", "hint"),
    [
        ({"schemes": ["pots"]}, "post"),
        ({"inits": ["xaver"]}, "xavier"),
        ({"base": small_base("hf:gpt2")}, "--schemes"),
        ({"base": small_base("nn:decoder,width=9,heads=2")}, "heads"),
        ({"lrs": []}, "--lrs"),
        ({"seeds": range(10**6)}, "at most"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_is_trained(axes, hint) -> None:
    with pytest.raises(UsageError, match=hint):
        small_grid(**axes)


def test_a_model_that_is_not_ours_has_rates_warmups_and_seeds() -> None:
    grid = Grid(base=small_base("hf:gpt2,n_layer=1,n_embd=8,n_head=1"), lrs=[1e-3, 1e-2], warmups=[0, 2])
    assert {(cell.scheme, cell.depth) for cell in grid.cells} == {(grid.base.model, None)}
    assert len(grid.cells) == 4


@pytest.mark.parametrize(("size", "workers"), [(1, 1), (3, 1), (4, 2), (16, 1), (16, 2), (64, 8)])
def test_crews_are_of_one_shape_and_size_and_hold_each_cell_once(size: int, workers: int) -> None:
    cells = small_grid(depths=[1, 2], seeds=[0, 1]).cells
    made = crews(cells, size, workers)
    assert sorted(cell.key for crew in made for cell in crew) == sorted(cell.key for cell in cells)
    for crew in made:
        assert len({cell.shape for cell in crew}) == 1
        assert 1 <= len(crew) <= size
        assert [c.lr for c in crew] == sorted(c.lr for c in crew)
    assert len(made) >= min(workers, len(cells))
    assert made == crews(cells, size, workers)


def test_large_models_are_stacked_less() -> None:
    cells = small_grid(base=small_base("nn:decoder,width=512,heads=8"), depths=[4]).cells
    most = MOST_NUMBERS // parameters_of(cells[0].config.model)
    assert {len(crew) for crew in crews(cells, 64)} == {max(1, most)}
    assert most < 4


@pytest.mark.parametrize(
    ("of_four", "of_eight", "size"), [(0.96, 0.96, 1), (0.94, 0.9, 4), (0.94, 0.88, 8), (1.1, 0.94, 8)]
)
def test_a_larger_stack_must_be_worth_it(
    monkeypatch: pytest.MonkeyPatch, of_four: float, of_eight: float, size: int
) -> None:
    seconds = {1: 1.0, 4: of_four, 8: of_eight}
    monkeypatch.setattr("normscope.maps.crews._seconds", lambda cell, sizes: seconds)
    assert measured_stack(small_grid().cells)["size"] == size


def test_stacks_are_measured_on_one_thread_as_workers_train(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(
        "normscope.maps.crews._seconds",
        lambda cell, sizes: found.append(torch.get_num_threads()) or dict.fromkeys(sizes, 1.0),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert measured_stack(small_grid().cells)["size"] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found == [1]


def test_a_range_has_no_more_rates_than_the_option_takes() -> None:
    assert len(rates("1e-4:3e-2:8", "--rates", 8)) == 8
    with pytest.raises(UsageError, match="--rates"):
        rates("1e-4:3e-2:9", "--rates", 8)
