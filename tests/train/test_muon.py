"""Parameters and step sizes of Muon, and the learning rates of μP and depth-μP under Muon and SGD."""

import pytest
import torch
from torch import nn

from normscope.errors import UsageError
from normscope.nn import SCHEMES, Residual, Where, build
from normscope.train import Recipe, build_optimizers, hidden_matrices

# As many ids as features and as many positions as hidden units: shapes tell nothing.
ALIKE = {"depth": 2, "width": 16, "heads": 2, "vocab": 16, "context": 64}
MUON = Recipe(optimizer="muon", lr=1e-2, weight_decay=0.0)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_muon_gets_the_matrices_of_the_branches_and_of_gates(name: str) -> None:
    model = build("decoder", scheme=name, **ALIKE)
    expected = set()
    for block in model.blocks:
        for branch, residual in block.sublayers().values():
            maps = [*branch.modules(), *(residual.join.modules() if name in ("gtrxl", "highway") else ())]
            expected |= {id(m.weight) for m in maps if isinstance(m, nn.Linear)}
    assert {id(p) for p in hidden_matrices(model)} == expected
    assert len(expected) >= 12


class Foreign(nn.Module):
    """Another library's model, with as many positions as hidden units and as many ids as features."""

    def __init__(self, *, tied: bool = False, named: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16, bias=False)  # registered first
        self.tokens, self.positions = nn.Embedding(16, 16), nn.Embedding(64, 16)
        if tied:
            self.head.weight = self.tokens.weight
        if named:
            self.lists = nn.ModuleList([self.head])
            self.get_output_embeddings = lambda: self.head
        sizes = {"qkv": 48, "up": 64, "o": 16}
        maps = [nn.ModuleDict({name: nn.Linear(16, size) for name, size in sizes.items()}) for _ in range(2)]
        self.layers = nn.ModuleList(maps)
        self.join = Residual("mhc", Where(1, depth=1), 16)
        self.hyper = Residual("hyper-connections", Where(1, depth=1), 16)


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"named": True}])
def test_the_output_layer_of_another_model_is_known_by_identity(options: dict[str, bool]) -> None:
    model = Foreign(**options)
    expected = [id(m.weight) for layer in model.layers for m in layer.values()]
    assert [id(p) for p in hidden_matrices(model)] == expected
    assert [id(p) for p in hidden_matrices(nn.ModuleDict({"module": model}))] == expected


def test_a_model_without_a_hidden_matrix_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16))
    with pytest.raises(UsageError, match="without a matrix"):
        build_optimizers(model, MUON)
    decoder = build("decoder", **ALIKE)
    decoder.blocks.requires_grad_(False)
    with pytest.raises(UsageError, match="without a matrix"):
        build_optimizers(decoder, MUON)


def test_a_step_of_muon_is_as_long_as_one_of_adamw() -> None:
    """RMS 0.2 times the rate, for each matrix of whatever shape."""
    model = build("decoder", **ALIKE)
    matrices = hidden_matrices(model)
    before = [p.detach().clone() for p in matrices]
    optimizers = build_optimizers(model, MUON)
    ids = torch.randint(16, (4, 9), generator=torch.Generator().manual_seed(0))
    model(ids[:, :-1], ids[:, 1:]).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    moves = torch.stack([(p - old).square().mean().sqrt() for p, old in zip(matrices, before, strict=True)])
    assert moves.numel() == 12
    assert (moves / MUON.lr - 0.2).abs().max() < 0.06  # Muon's Newton-Schulz leaves σ within 0.7 to 1.2


def rates(optimizer: str, **options: object) -> dict[str, tuple[float, float]]:
    """Rate and decay by name, at rate 1 and decay 1."""
    model = build("decoder", width=64, heads=2, vocab=11, **options)
    found = build_optimizers(model, Recipe(optimizer=optimizer, lr=1.0, weight_decay=1.0))
    group_of = {id(p): group for o in found for group in o.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert {id(p) for p in named.values()} == set(group_of)
    return {name: (group_of[id(p)]["lr"], group_of[id(p)]["weight_decay"]) for name, p in named.items()}


def test_mup_and_depth_mup_have_rates_under_muon() -> None:
    """m_N = 4, m_L = 2: matrices at lr/√4, decay × √4; at a = 1 the depth changes no rate."""
    found = rates("muon", scheme="depth-mup", init="mup", depth=4, base_width=16)
    assert found["blocks.0.attention.q.weight"] == (0.5, 2.0)
    assert found["blocks.0.attention.q.bias"] == (1.0, 0.0)
    assert found["embedding.tokens.weight"] == found["head.weight"] == (1.0, 1.0)


def test_depth_mup_has_rates_under_sgd_and_mup_refuses_it() -> None:
    """m_L = 2, a = 1: the blocks at lr · m_L."""
    found = rates("sgd", scheme="depth-mup", depth=4)
    assert found["blocks.0.attention.q.weight"] == (2.0, 1.0)
    assert found["blocks.0.attention.q.bias"] == (2.0, 0.0)
    assert found["embedding.tokens.weight"] == found["head.weight"] == (1.0, 1.0)
    with pytest.raises(UsageError, match="μP with optimizer sgd"):
        rates("sgd", init="mup", depth=1, base_width=16)
    assert set(rates("sgd", init="mup", depth=1, base_width=64).values()) == {(1.0, 1.0), (1.0, 0.0)}
