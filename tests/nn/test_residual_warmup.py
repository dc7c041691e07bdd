"""Progressive residual warm-up: branch l counts min(t/(T·l), 1) times in step t."""

from typing import Any

import dense
import pytest
import torch
from torch import Tensor

from normscope.anatomy import read_anatomy
from normscope.nn import build, load_model, save_model, swap
from normscope.nn.language_model import LanguageModel
from normscope.train.recipe import Recipe
from normscope.train.trial import Trial

SMALL: dict[str, Any] = {"depth": 3, "width": 16, "heads": 2, "vocab": 11, "context": 16}
T = 4


def at_step(step: int, **options: Any) -> LanguageModel:
    """A float64 model whose current step is `step`, from 1."""
    torch.manual_seed(0)
    model = build("decoder", **{"residual_warmup": T, **SMALL, **options}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for _ in range(step - 1):
        model.after_step()
    return model


def by_hand(model: LanguageModel, ids: Tensor, step: int, scheme: str) -> Tensor:
    x = model.embedding(ids, torch.arange(ids.shape[1])[None])
    for number, block in enumerate(model.blocks, start=1):
        share = min(step / (T * number), 1.0)
        for kind, (branch, residual) in block.sublayers().items():
            run = dense.attention if kind == "attention" else dense.feed_forward
            n_in, n_stream = (residual.norms[slot] for slot in ("branch_in", "stream"))
            if scheme == "pre":
                x = x + share * run(branch, dense.norm(n_in, x))
            else:
                x = dense.norm(n_stream, x + share * run(branch, x))
    return model.head(dense.norm(model.final_norm, x))


@pytest.mark.parametrize("scheme", ["pre", "post"])
@pytest.mark.parametrize("step", [1, 3, 4, 5, 8, 11, 12, 40])
def test_it_is_the_papers_schedule(scheme: str, step: int) -> None:
    model, ids = at_step(step, scheme=scheme).train(), torch.randint(11, (1, 5))
    torch.testing.assert_close(model(ids).logits, by_hand(model, ids, step, scheme), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        model.eval()(ids).logits, by_hand(model, ids, step, scheme), rtol=1e-6, atol=1e-6
    )


def test_after_the_warm_up_it_is_the_plain_model() -> None:
    warmed, plain, ids = at_step(3 * T), build("decoder", **SMALL).double(), torch.randint(11, (1, 5))
    plain.load_state_dict(warmed.state_dict(), strict=False)
    assert torch.equal(warmed(ids).logits, plain(ids).logits)


def test_training_counts_its_steps() -> None:
    model = build("decoder", residual_warmup=T, **SMALL)
    batch = (torch.randint(11, (2, 6)), torch.randint(11, (2, 6)))
    trial = Trial(model, iter([batch] * 3), lambda model, batch: model(*batch).loss, Recipe())
    for _ in range(3):
        trial.advance()
    counts = {int(value) for name, value in model.state_dict().items() if name.endswith(".steps")}
    assert counts == {3}


def test_files_hold_the_count_and_half_precision_keeps_it(tmp_path: Any) -> None:
    model = at_step(3000, residual_warmup=10**6).half()
    save_model(model, tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    assert {int(r.steps) for block in again.blocks for _, r in block.sublayers().values()} == {2999}
    assert not [name for name in build("decoder", **SMALL).state_dict() if name.endswith(".steps")]


def test_a_swap_keeps_the_count() -> None:
    model = build("decoder", residual_warmup=T, **SMALL)
    model.after_step()
    assert int(swap(model, "post").blocks[0].attention_residual.steps) == 1


def test_the_reading_shows_the_current_share() -> None:
    anatomy = read_anatomy(at_step(2), torch.randint(11, (1, 5)))
    shares = [{branch.branch_scale for branch in block.branches} for block in anatomy.blocks]
    assert [share.pop() for share in shares] == pytest.approx([2 / 4, 2 / 8, 2 / 12])
    assert {branch.placement for branch in anatomy.branches} == {"pre"}
