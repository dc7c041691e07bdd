"""Training of cells, whose result depends on the config and not on the stack, and early stopping."""

import copy
import math

import pytest
import torch
from small_maps import small_base, small_grid

import normscope
from normscope.maps import Cell, train_group
from normscope.maps.certain import ALIKE, EVERY, all_alike
from normscope.subjects import Subject
from normscope.subjects.feed import tensors_in
from normscope.train import Trial, last_loss, trains


def alone(cell: Cell) -> list[float]:
    """Reference: the cell's losses by a plain trial."""
    subject = cell.config.subject()
    trial = Trial(subject.model, subject.batches(), lambda m, b: subject.loss(b, m), cell.config.trial)
    for _ in range(cell.config.trial.steps):
        trial.advance()
    return trial.losses


@pytest.mark.parametrize("scheme", ["post", "pre", "deepnorm"])
def test_every_cell_of_a_stack_is_what_it_is_alone(scheme: str) -> None:
    cells = small_grid(schemes=[scheme], lrs=[1e-3, 1e-2], warmups=[0, 4], seeds=[0, 1]).cells
    for cell, result in zip(cells, train_group(cells), strict=True):
        assert result.losses == pytest.approx(alone(cell), rel=2e-5)
        assert result.stack == len(cells)
    lone = train_group(cells[:1])[0]
    assert lone.losses == pytest.approx(alone(cells[0]), rel=1e-6)


def test_the_data_of_a_cell_do_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses depend only on the data and the seed's weights at a learning rate of almost zero."""
    cells = small_grid(schemes=["pre"], lrs=[1e-30], seeds=[0, 1, 2]).cells
    together = {cell: result.losses for cell, result in zip(cells, train_group(cells), strict=True)}
    turned = {cell: r.losses for cell, r in zip(cells[::-1], train_group(cells[::-1]), strict=True)}
    for cell in cells:
        (result,) = train_group([cell])
        assert result.losses == pytest.approx(together[cell], rel=1e-6)
        assert turned[cell] == pytest.approx(together[cell], rel=1e-6)
    assert len({losses[0] for losses in together.values()}) == 3


def test_the_same_crew_gives_the_same_bits() -> None:
    cells = small_grid(base=small_base("nn:decoder,width=8,heads=1,dropout=0.1"), schemes=["post"]).cells
    torch.manual_seed(1)
    first = [result.losses for result in train_group(cells)]
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert [result.losses for result in train_group(cells)] == first
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_stacked_is_trained_one_after_another() -> None:
    cells = small_grid(base=small_base(optimizer="muon"), schemes=["pre"], seeds=[0, 1]).cells
    for cell, result in zip(cells, train_group(cells), strict=True):
        assert result.losses == pytest.approx(alone(cell), rel=1e-6)


def test_the_verdict_is_that_of_train() -> None:
    cells = small_grid(base=small_base(steps=60), schemes=["pre"], lrs=[1e-4, 3e-2]).cells
    results = train_group(cells)
    for result in results:
        assert result.verdict == ("trains" if trains(result.losses, result.unigram_entropy) else "fails")
        assert len(result.losses) == 60
        assert result.seconds > 0
        assert result.versions["normscope"] == normscope.__version__
    assert results[0].losses[-1] > results[1].losses[-1]


def test_a_loss_that_is_not_finite_ends_the_cell_and_nothing_else() -> None:
    cells = small_grid(base=small_base(optimizer="sgd"), schemes=["pre"], lrs=[1e-3, 1e30]).cells
    quiet, loud = train_group(cells, early_stop=False)
    assert loud.verdict == "fails"
    assert loud.certain == "the loss is not finite"
    assert loud.certain_at == len(loud.losses) < 8
    assert not math.isfinite(loud.losses[-1])
    assert quiet.certain is None
    assert quiet.losses == pytest.approx(alone(cells[0]), rel=2e-5)


def collapsed() -> tuple[Cell, ...]:
    """Deep Post-LN at learning rates that make all tokens equal at once, and at one that does not."""
    base = small_base("nn:decoder,width=8,heads=1", steps=2 * EVERY)
    return small_grid(base=base, schemes=["post"], depths=[8], lrs=[1e-7, 3.0]).cells


def test_a_run_whose_tokens_are_all_alike_is_stopped_at_the_next_look() -> None:
    cells = collapsed()
    fine, *stopped = train_group(cells)
    assert (len(fine.losses), fine.stopped, fine.certain) == (2 * EVERY, False, None)
    for result in stopped:
        assert (result.stopped, result.verdict, result.certain_at) == (True, "fails", EVERY)
        assert len(result.losses) == EVERY
        assert "every token looks the same" in result.certain
    _, *to_the_end = train_group(cells, early_stop=False)
    for result, whole in zip(stopped, to_the_end, strict=True):
        assert len(whole.losses) == 2 * EVERY
        assert (whole.stopped, whole.certain_at) == (False, EVERY)
        assert whole.losses[:EVERY] == pytest.approx(result.losses, rel=1e-4)


def test_each_cell_is_looked_at_with_the_batch_of_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def first(subject: Subject) -> torch.Tensor:
        return tensors_in(subject.batch)[0]

    looked = "normscope.maps.training.diversity"
    monkeypatch.setattr(looked, lambda subject, anatomy, model: seen.append(first(subject)))
    cells = small_grid(base=small_base(steps=EVERY), schemes=["pre"], lrs=[1e-3], seeds=[0, 1]).cells
    train_group(cells)
    for batch, cell in zip(seen, cells, strict=True):
        assert torch.equal(batch, first(cell.config.subject()))
    assert not torch.equal(*seen)


def test_a_look_leaves_the_run_as_it_was() -> None:
    base = small_base("nn:decoder,width=8,heads=1,dropout=0.2", steps=EVERY + 2)
    cell = small_grid(base=base, schemes=["pre"], lrs=[1e-2]).cells[0]
    (result,) = train_group([cell])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert result.losses == pytest.approx(alone(cell), rel=1e-6)


def test_only_a_diversity_under_the_line_is_certain() -> None:
    assert all_alike(None) is None
    assert all_alike(math.nan) is None
    assert all_alike(ALIKE * 1.01) is None
    assert all_alike(ALIKE) is not None
    assert all_alike(0.0) is not None
    assert all_alike(1e-9) is None, "a run goes on as long as float32 tells its tokens apart"
    assert all_alike(1e-11) is not None


def test_a_caller_hears_every_step_and_may_end_it() -> None:
    class Enough(Exception):
        pass

    heard = []

    def on_step(step: int) -> None:
        heard.append(step)
        if step == 3:
            raise Enough

    with pytest.raises(Enough):
        train_group(small_grid(schemes=["pre"]).cells, on_step=on_step)
    assert heard == [1, 2, 3]


def test_a_model_without_a_loss_is_refused(tmp_path) -> None:
    path = tmp_path / "user.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n    model, batch = nn.Linear(3, 3), torch.randn(2, 3)\n"
        "    return model, batch, lambda out, batch: out.square().mean()\n"
    )
    cell = Cell(small_base(f"{path}:build"))
    with pytest.raises(normscope.UsageError, match="entropy"):
        train_group([cell])


def test_cells_are_not_changed_by_training() -> None:
    cells = small_grid(schemes=["pre"]).cells
    before = copy.deepcopy([cell.config for cell in cells])
    results = train_group(cells)
    assert [cell.config for cell in cells] == before
    assert last_loss(results[0].losses) < results[0].losses[0]
