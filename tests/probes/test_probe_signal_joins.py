"""Tests of the update-to-stream ratio against forward hooks, for every way to write the sum."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_read import WIDTH, Attention, FeedForward, subject_of
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.nn import SCHEMES, build
from normscope.nn.residual import Residual
from normscope.probes import Measurements
from normscope.probes.gradient import measure_gradient
from normscope.probes.signal import measure_signal

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The sum of a stream x and a term f, with a learnt g."""

FIXED: dict[str, Way] = {
    "x + .3·f": lambda x, f, g: x + 0.3 * f,
    "f/(10/3) + x": lambda x, f, g: f / (10 / 3) + x,
    "add, alpha": lambda x, f, g: torch.add(x, f, alpha=0.3),
    "add_, alpha": lambda x, f, g: x.clone().add_(f, alpha=0.3),
    "sub of the negative, alpha": lambda x, f, g: torch.sub(x, -f, alpha=0.3),
    "sub, negative alpha": lambda x, f, g: torch.sub(x, f, alpha=-0.3),
    "addcmul, value": lambda x, f, g: torch.addcmul(x, f, torch.ones_like(f), value=0.3),
    "addcdiv, value": lambda x, f, g: torch.addcdiv(x, f, torch.full((1,), 10.0, dtype=f.dtype), value=3),
    "x + .5·(.6·f + bias)": lambda x, f, g: x + 0.5 * torch.add(0 * g, f, alpha=0.6),
    "the negative": lambda x, f, g: x - -0.3 * f,
}
LEARNT: dict[str, Way] = {
    "x + g·f": lambda x, f, g: x + g * f,
    "addcmul(x, f, g)": lambda x, f, g: torch.addcmul(x, f, g),
    "addcmul(x, g, f)": lambda x, f, g: torch.addcmul(x, g, f),
    "addcmul, value": lambda x, f, g: torch.addcmul(x, f, g / 4, value=4),
    "addcmul_": lambda x, f, g: x.clone().addcmul_(f, g),
    "addcdiv": lambda x, f, g: torch.addcdiv(x, f, 1 / g),
    "addcdiv_, value": lambda x, f, g: x.clone().addcdiv_(f, 3 / g, value=3),
    "f/(1/g) + x": lambda x, f, g: f / (1 / g) + x,
}
BETWEEN: dict[str, Way] = {
    "lerp": lambda x, f, g: torch.lerp(x, f, g),
    "lerp_": lambda x, f, g: x.clone().lerp_(f, g),
    "lerp backwards": lambda x, f, g: torch.lerp(f, x, 1 - g),
    "x + g·(f − x)": lambda x, f, g: x + g * (f - x),
    "addcmul(x, g, f − x)": lambda x, f, g: torch.addcmul(x, g, f - x),
    "(1 − g)·x + g·f": lambda x, f, g: (1 - g) * x + g * f,
    "addcmul((1 − g)·x, g, f)": lambda x, f, g: torch.addcmul((1 - g) * x, g, f),
    "addcmul(g·f, 1 − g, x)": lambda x, f, g: torch.addcmul(g * f, 1 - g, x),
}
FIXED_BETWEEN: dict[str, Way] = {
    ".7·x + .3·f": lambda x, f, g: 0.7 * x + 0.3 * f,
    "lerp": lambda x, f, g: torch.lerp(x, f, 0.3),
    "lerp backwards": lambda x, f, g: torch.lerp(f, x, 0.7),
    "lerp, tensor": lambda x, f, g: torch.lerp(x, f, torch.tensor(0.3, dtype=f.dtype)),
    "(x + f·3/7)·.7": lambda x, f, g: torch.add(x, f, alpha=3 / 7) * 0.7,
}
SHRUNK: dict[str, Way] = {
    "y − g·y": lambda x, f, g: _shrunk(x + f, g),
    "(1 − g)·x + (1 − g)·f": lambda x, f, g: (1 - g) * x + (1 - g) * f,
}


def _shrunk(y: Tensor, g: Tensor) -> Tensor:
    return y - g * y.detach()


TRUTH: dict[str, tuple[dict[str, Way], Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "fixed": (FIXED, lambda g: 1.0, lambda g: 0.3),
    "learnt": (LEARNT, lambda g: 1.0, lambda g: g),
    "between": (BETWEEN, lambda g: 1 - g, lambda g: g),
    "fixed between": (FIXED_BETWEEN, lambda g: 0.7, lambda g: 0.3),
    "shrunk": (SHRUNK, lambda g: 1 - g, lambda g: 1 - g),
}
"""Factors of the stream and of the term, for every member of a family."""


class Sublayer(nn.Module):
    """A way to write the sum, around a feed-forward."""

    def __init__(self, way: Way, gain: Tensor) -> None:
        super().__init__()
        self.way, self.norm, self.f = way, nn.LayerNorm(WIDTH), FeedForward()
        self.g = nn.Parameter(gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x, self.f(self.norm(x)), self.g)


def stack(way: Way, gain: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Sublayer(way, gain.clone()) for _ in range(2))).double()


def signal(model: nn.Module, batch: Tensor) -> Measurements:
    return Measurements(measure_signal(subject_of(model, batch), read_anatomy(model, batch)))


def rms(x: Tensor) -> float:
    return float(x.detach().square().mean().sqrt())


@pytest.mark.parametrize("features", [1, WIDTH])
@pytest.mark.parametrize(("family", "name"), [(f, n) for f, (ways, *_) in TRUTH.items() for n in ways])
def test_the_share_is_that_of_plain_hooks_however_the_sum_is_written(
    family: str, name: str, features: int
) -> None:
    ways, of_stream, of_term = TRUTH[family]
    model = stack(ways[name], torch.linspace(0.2, 0.4, features))
    batch = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    rows = signal(model, batch)
    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        hook = lambda m, args, output, name=name: seen.update({name: output, f"{name} input": args[0]})  # noqa: E731
        module.register_forward_hook(hook)
    model(batch)
    for i in range(2):
        g = model[i].g
        term, stream = rms(of_term(g) * seen[f"{i}.f"]), rms(of_stream(g) * seen[f"{i} input"])
        assert rows.of("branch/rms")[f"{i}.f"] == pytest.approx(term, rel=1e-6)
        assert rows.of("branch/update-ratio")[f"{i}.f"] == pytest.approx(term / stream, rel=1e-6)


def one_stream(name: str) -> bool:
    """Whether a scheme's state is one stream, and its sum linear in the branch (GTrXL's gate is not)."""
    return SCHEMES[name].join.kind not in ("streams", "none") and name not in (
        "gtrxl",
        "b2t",
        "parallel",
        "nanochat",
    )


@pytest.mark.parametrize("name", list(filter(one_stream, SCHEMES)))
def test_the_share_of_our_own_schemes_is_what_the_sum_is_without_the_branch(name: str) -> None:
    """Each join is called twice: with its branch, and with zero instead of it."""
    torch.manual_seed(0)
    model = build("decoder", scheme=name, width=8, heads=2, vocab=16, context=8, depth=2, base_depth=1)
    model = model.double().eval()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.rand_like(parameter))  # factors that start with zero, too
    batch = torch.randint(16, (2, 5))
    rows = signal(model, batch)
    ratios: list[float] = []
    for residual in (m for m in model.modules() if isinstance(m, Residual)):

        def measure(m: nn.Module, args: Any, output: Any) -> None:
            state, update, _ = args
            whole = m.forward(state, update, lambda x: x)
            stream = m.forward(state, lambda x: torch.zeros_like(x), lambda x: x)
            ratios.append(rms(whole - stream) / rms(stream))

        residual.join.register_forward_hook(measure)
    model(batch)
    found = list(rows.of("branch/update-ratio").values())
    assert found == pytest.approx(ratios, rel=1e-6)


class Parallel(nn.Module):
    """x + .5·(A(x) + .25·F(x)): factors inside an inner add and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.f = nn.LayerNorm(WIDTH), Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + 0.5 * torch.add(self.a(n), self.f(n), alpha=0.25)


def test_branches_that_share_a_factor_each_have_it() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Parallel(), Parallel()), torch.randn(2, 5, WIDTH)
    rows = signal(model, batch)
    seen: dict[str, float] = {}
    for name in ("0.a", "0.f", "1.a", "1.f"):
        hook = lambda m, args, output, name=name: seen.update({name: rms(output)})  # noqa: E731
        model.get_submodule(name).register_forward_hook(hook)
    model(batch)
    expected = {name: value * (0.5 if name.endswith("a") else 0.125) for name, value in seen.items()}
    assert rows.of("branch/rms") == pytest.approx(expected, rel=1e-5)


class Product(nn.Module):
    """A feed-forward whose last matmul adds its product to the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, self.up(self.norm(x)).relu(), self.down)


def test_a_term_that_is_no_tensor_has_a_reason() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Product(), Product())
    rows = signal(model, torch.randn(5, WIDTH))
    sites = [row.site for row in rows if row.quantity == "branch/rms"]
    assert len(sites) == 2
    for quantity in ("branch/rms", "branch/update-ratio"):
        for site in sites:
            row = rows.find(quantity, site)
            assert row is not None
            assert row.value is None
            assert "no tensor of its own" in row.how


@pytest.mark.parametrize("name", [name for name in LEARNT if "div" not in name and "/(" not in name])
def test_a_factor_of_zero_is_a_silent_branch_that_trains_however_it_is_written(name: str) -> None:
    model, batch = stack(LEARNT[name], torch.zeros(1)), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    subject = subject_of(model, batch, lambda output, _: output.square().sum())
    rows = Measurements(measure_gradient(subject, read_anatomy(model, batch)))
    assert rows.of("branch/zero-output") == {"0.f": 1.0, "1.f": 1.0}
    assert rows.of("branch/trainable") == {"0.f": 1.0, "1.f": 1.0}  # by its factor
