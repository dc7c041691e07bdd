"""Diversity without dropout's noise: a collapse shows, the run stays the same, and what cannot be is said."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.monitor import Monitor, RunReader
from normscope.monitor.after import check_run
from normscope.monitor.alarms import is_measured
from normscope.subjects.rng import draws_since

WIDTH, P = 8, 0.1


class Module(nn.Dropout):
    def __init__(self) -> None:
        super().__init__(P)


class Function(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, P, self.training)


class Always(nn.Module):
    """Dropout that was not told of eval mode, a frequent slip."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, p=P)


class Fused(nn.Module):
    """Attention of each token to all, with dropout in the fused kernel whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=P)


class Paths(nn.Module):
    """Stochastic depth of samples, with its own random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), x.shape[1], 1) > P) if self.training else x


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


KINDS = [Module, Function, Always, Fused, Paths]


class Residual(nn.Module):
    def __init__(self, noise: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.drop = noise()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Residual blocks on ids, with state that a forward changes: a counter, and batch statistics if asked."""

    def __init__(self, noise: Callable[[], nn.Module], *, with_statistics: bool = False) -> None:
        super().__init__()
        self.embedding, self.seen = nn.Embedding(16, WIDTH), [0]
        self.blocks = nn.ModuleList(Residual(noise) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.statistics = nn.BatchNorm1d(16) if with_statistics else nn.Identity()
        self.raises_in_eval = False

    def forward(self, ids: Tensor) -> Tensor:
        if self.raises_in_eval and not self.training:
            raise ValueError("only for training")
        self.seen[0] += 1
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.statistics(self.head(self.norm(x)).transpose(1, 2)).transpose(1, 2)


def trained(
    model: Blocks,
    path: Path | None,
    steps: int,
    before: Callable[[int], Any] = lambda step: None,
    lr: float = 0.0,
) -> tuple[Monitor | None, list[Any]]:
    """Train the model, watched if there is a path; the monitor, and all that a run leaves behind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator, left = torch.Generator().manual_seed(1), list[Any]()

    def run(monitor: Monitor | None) -> None:
        for step in range(1, steps + 1):
            before(step)
            ids = torch.randint(0, 16, (4, 6), generator=generator)
            loss = functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            left.extend([loss.detach(), *(p.grad.clone() for p in model.parameters())])
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(loss)
        left.extend([*model.state_dict().values(), torch.get_rng_state(), torch.tensor(model.seen)])

    if path is None:
        run(None)
        return None, left
    with Monitor(model, optimizer, store=path, every=5, on_alarm=lambda _: None) as monitor:
        run(monitor)
    assert monitor.failure is None, monitor.failure
    return monitor, left


def make_tokens_equal(model: Blocks) -> None:
    with torch.no_grad():
        model.embedding.weight.copy_(model.embedding.weight[:1].expand(16, WIDTH).clone())


def diversity(path: Path) -> tuple[list[str], np.ndarray]:
    with RunReader(path) as reader:
        _, sites, values = reader.table("stream/diversity")
    return list(sites), values


@pytest.mark.parametrize("noise", KINDS)
def test_a_collapse_is_found_behind_dropout(noise: type[nn.Module], path: Path) -> None:
    """All tokens become equal at step 31; the noise made their diversity 0.001 to 0.1."""
    torch.manual_seed(0)
    model = Blocks(noise)
    monitor, _ = trained(model, path, 60, lambda step: make_tokens_equal(model) if step == 31 else None)
    assert "NS808" in {each.finding.code for each in monitor.alarms}
    _, values = diversity(path)
    assert (values[-1][is_measured(values[-1])] < 1e-10).all()
    assert check_run(path).verdict == "failed"


def test_the_figures_with_dropout_are_those_of_the_same_weights_without(tmp_path: Path) -> None:
    found = {}
    for noise in (Nothing, *KINDS[:3]):
        torch.manual_seed(0)
        trained(Blocks(noise), tmp_path / f"{noise.__name__}.db", 11)
        found[noise] = diversity(tmp_path / f"{noise.__name__}.db")
    sites, expected = found[Nothing]
    of_blocks = [i for i, site in enumerate(sites) if site.startswith("blocks.")]
    assert of_blocks
    for noise in KINDS[:3]:
        assert found[noise][0] == sites
        np.testing.assert_allclose(found[noise][1][:, of_blocks], expected[:, of_blocks], rtol=1e-5)


@pytest.mark.parametrize("noise", [*KINDS, Nothing])
def test_a_run_with_dropout_is_the_same_to_the_bit(noise: type[nn.Module], path: Path) -> None:
    """Losses, gradients, weights, batch statistics, generators, and a counter in a list."""
    left = []
    for store in (None, path):
        torch.manual_seed(0)
        model = Blocks(noise, with_statistics=True)
        model.blocks[0].drop.eval()  # a part that the loop has frozen
        left.append(trained(model, store, 11, lr=1e-2)[1])
        assert [module.training for module in model.modules()].count(False) == 1
    assert len(left[0]) == len(left[1])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_a_model_without_noise_is_not_run_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("normscope.monitor.noise.untouched", calls.append)
    trained(Blocks(Nothing), path, 11)
    assert not calls


def raises_in_eval(model: Blocks, step: int) -> None:
    model.raises_in_eval = step > 1


def compiled(model: Blocks, step: int) -> None:
    if step == 1:
        model.blocks[0].compile(backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by dynamo
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (raises_in_eval, "a forward in eval mode failed (ValueError: only for training)"),
        (compiled, "a compiled model is not run in eval mode, which would compile it again"),
    ],
)
def test_a_run_whose_noise_stays_is_not_judged_healthy(
    change: Callable[[Blocks, int], None], why: str, path: Path
) -> None:
    torch.manual_seed(0)
    model = Blocks(Module)
    monitor, _ = trained(model, path, 110, lambda step: change(model, step), lr=1e-4)
    assert [note for note in monitor.notes if why in note and "NS808" in note], monitor.notes
    report = check_run(path)
    assert report.verdict == "undecided"
    assert f"NS808 late-collapse was not judged: dropout can hide it, and {why}" in report.why
    assert "not judged" not in check_run(path, ignore="NS808").why
    _, values = diversity(path)
    assert is_measured(values[-1]).any(), "the noisy figures stay"


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), np.random.rand, random.random])
def test_a_draw_from_any_generator_is_seen(draw: Callable[[], Any]) -> None:
    has_drawn = draws_since()
    assert not has_drawn()
    draw()
    assert has_drawn()
