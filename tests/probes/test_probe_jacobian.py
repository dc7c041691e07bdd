"""Tests of every Jacobian figure against dense float64, and of the reasons where a model has none."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from normscope.anatomy import read_anatomy
from normscope.probes import Measurements
from normscope.probes.jacobian import measure_jacobian
from normscope.subjects import Subject

VOCAB = 11


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class FeedForward(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """α·x + branch, twice; `placement` says where the norms are."""

    def __init__(self, d: int, placement: str, alpha: float = 1.0) -> None:
        super().__init__()
        self.placement, self.alpha = placement, alpha
        self.attention, self.feed_forward = Attention(d), FeedForward(d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(4))
        for norm in self.norms:
            nn.init.normal_(norm.weight, 1.0, 0.3)

    def term(self, i: int, x: Tensor) -> Tensor:
        branch = (self.attention, self.feed_forward)[i]
        x = self.norms[i](x) if self.placement in ("pre", "peri") else x
        x = branch(x)
        return self.norms[2 + i](x) if self.placement in ("res-post", "peri") else x

    def join(self, i: int, x: Tensor) -> Tensor:
        total = (x if self.alpha == 1 else self.alpha * x) + self.term(i, x)
        return self.norms[i](total) if self.placement == "post" else total

    def forward(self, x: Tensor) -> Tensor:
        return self.join(1, self.join(0, x))


class Model(nn.Module):
    def __init__(self, d: int, make: Callable[[], nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.final, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def stack(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.final(self.stack(self.embedding(ids))))


def subject_of(model: nn.Module, batch: Tensor) -> Subject:
    return Subject(model, batch, None, lambda: iter([batch]), 0, "test", "test")


def ids(tokens: int) -> Tensor:
    return torch.randint(VOCAB, (4, tokens), generator=torch.Generator().manual_seed(1))


def measure(model: nn.Module, batch: Tensor) -> Measurements:
    subject = subject_of(model, batch)
    return Measurements(measure_jacobian(subject, read_anatomy(subject)))


def value(rows: Measurements, quantity: str, site: str) -> float:
    found = rows.find(f"jacobian/{quantity}", site)
    assert found is not None, (quantity, site)
    assert isinstance(found.value, float), found.how
    return found.value


def reason(rows: Measurements, quantity: str, site: str) -> str:
    found = rows.find(f"jacobian/{quantity}", site)
    assert found is not None
    assert found.value is None
    assert found.how.startswith("not measured: ")
    return found.how


def dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.jacobian(f, x, vectorize=True).reshape(-1, x.numel())


def gpt(d: int, placement: str, alpha: float = 1.0) -> Model:
    return Model(d, lambda: Block(d, placement, alpha)).double()


@pytest.mark.parametrize("placement", ["pre", "post", "res-post", "peri"])
def test_every_figure_is_that_of_the_dense_jacobian(placement: str) -> None:
    d, tokens = 8, 5
    model, batch = gpt(d, placement), ids(tokens)
    rows = measure(model, batch)
    entry = model.embedding(batch[:1]).detach()
    start = x = entry
    for number, block in enumerate(model.blocks):
        for i, name in enumerate(("attention", "feed_forward")):
            expected = torch.linalg.svdvals(dense(lambda t, b=block, i=i: b.term(i, t), x))[0]
            site = f"blocks.{number}.{name}"
            assert value(rows, "branch-norm", site) == pytest.approx(float(expected), rel=5e-2)
            assert value(rows, "weyl", site) <= 1 - float(expected) * (1 - 1e-9)
            assert value(rows, "weyl", site) == pytest.approx(1 - float(expected), abs=0.25 * float(expected))
            x = block.join(i, x).detach()
        values = torch.linalg.svdvals(dense(block, start))
        site = f"blocks.{number}"
        assert value(rows, "dimension", site) == d * tokens
        assert value(rows, "sigma-max", site) == pytest.approx(float(values[0]), rel=5e-2)
        for quantity in ("sigma-min", "rank", "condition", "log-sigma", "token-rank"):
            assert "needs --budget deep" in reason(rows, quantity, site)
        start = block(start).detach()
    whole = dense(model.stack, entry)
    largest = float(torch.linalg.svdvals(whole)[0])
    assert value(rows, "sigma-max", "decoder") == pytest.approx(largest, rel=1e-2)
    gain = math.log10(float(whole.norm()) / math.sqrt(d * tokens))
    assert value(rows, "contraction", "decoder") == pytest.approx(gain, abs=0.15)
    errors = rows.of("derivative/relative-error")
    assert set(errors) == {
        "decoder",
        *(f"blocks.{i}{part}" for i in (0, 1) for part in ("", ".attention", ".feed_forward")),
    }
    assert max(errors.values()) < 1e-3


def test_the_contraction_is_the_decade_of_the_gain() -> None:
    """The stream is multiplied by 10 four times; branches beside it are small."""
    rows = measure(gpt(8, "pre", alpha=10.0), ids(3)[:1])
    assert value(rows, "contraction", "decoder") == pytest.approx(4, abs=0.1)


def symmetric(d: int, num_blocks: int) -> tuple[Model, Tensor]:
    """A model whose branches are one symmetric matrix without an outlying eigenvalue; and its eigenvalues."""
    drawn = torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = (drawn + drawn.T) / (4 * (2 * d) ** 0.5)
    model = Model(d, lambda: Block(d, "none"), num_blocks).double()
    for block in model.blocks:
        block.attention, block.feed_forward = (nn.Linear(d, d, bias=False).double() for _ in range(2))
        for branch in (block.attention, block.feed_forward):
            branch.weight.data = matrix.clone()
    return model, torch.linalg.eigvalsh(matrix)


def test_bounds_hold_where_branches_reach_them_and_their_norms_are_estimates() -> None:
    """Each bound is tight up to errors here: products of estimates from below would be under σ_max."""
    model, values = symmetric(130, 2)
    rows = measure(model, ids(4)[:1])
    lowest, highest, error = 1 + float(values[0]), 1 + float(values[-1]), 0.25
    least = 1 - (1 + error) * max(-float(values[0]), float(values[-1]))
    for block in range(2):
        site = f"blocks.{block}"
        assert value(rows, "sigma-max", site) < highest**2
        assert value(rows, "weyl", f"{site}.attention") <= lowest
        assert least**2 < value(rows, "lower-bound", site) <= lowest**2
    (above,), (below,) = (rows.of(f"jacobian/log-{side}-bound").values() for side in ("upper", "lower"))
    assert 4 * math.log10(highest) <= above < 2 * math.log10((1 + error) * highest**2)
    assert 4 * math.log10(least) < below <= 4 * math.log10(lowest)


def test_the_figures_say_how_they_were_come_by() -> None:
    rows = measure(gpt(8, "pre"), ids(5))
    how = rows.find("jacobian/branch-norm", "blocks.0.attention").how
    assert "iterative, converged, relative error ≤ 0.0" in how
    assert "products; B = 1, eval mode, math attention" in how
    how = rows.find("jacobian/contraction", "decoder").how
    assert "error -0.22 … +0.46 (95% confidence" in how


class Inside(Block):
    """A Pre-LN block whose factor on the branch is inside the add."""

    def __init__(self, d: int, how: str) -> None:
        super().__init__(d, "pre")
        self.how, self.factor = how, nn.Parameter(torch.full((d,), 0.1))

    def join(self, i: int, x: Tensor) -> Tensor:
        if self.how == "alpha":
            return torch.add(x, self.term(i, x), alpha=0.1)
        return torch.addcmul(x, self.factor, self.term(i, x))


def test_a_factor_inside_the_add_counts() -> None:
    model, batch = Model(8, lambda: Inside(8, "alpha")).double(), ids(5)
    rows = measure(model, batch)
    block, x = model.blocks[0], model.embedding(batch[:1]).detach()
    expected = 0.1 * float(torch.linalg.svdvals(dense(lambda t: block.term(0, t), x))[0])
    assert value(rows, "branch-norm", "blocks.0.attention") == pytest.approx(expected, rel=5e-2)


def test_a_tensor_inside_the_add_leaves_the_branch_unmeasured_and_the_block_measured() -> None:
    model, batch = Model(8, lambda: Inside(8, "addcmul")).double(), ids(5)
    rows = measure(model, batch)
    assert "inside the sum" in reason(rows, "branch-norm", "blocks.0.attention")
    values = torch.linalg.svdvals(dense(model.blocks[0], model.embedding(batch[:1]).detach()))
    assert value(rows, "sigma-max", "blocks.0") == pytest.approx(float(values[0]), rel=5e-2)


def test_weyl_knows_the_scale_of_the_stream() -> None:
    rows = measure(gpt(8, "post", alpha=2.5), ids(5))
    site = "blocks.1.attention"
    norm = value(rows, "branch-norm", site)
    assert 2.5 - 1.25 * norm <= value(rows, "weyl", site) <= 2.5 - norm
    assert "α = 2.5" in rows.find("jacobian/weyl", site).how


class Gated(Block):
    def __init__(self, d: int) -> None:
        super().__init__(d, "pre")
        self.gain = nn.Parameter(torch.full((2,), 0.7))

    def join(self, i: int, x: Tensor) -> Tensor:
        return self.gain[i] * x + self.term(i, x)


def test_weyl_is_not_measured_where_the_scale_is_learnt() -> None:
    rows = measure(Model(8, lambda: Gated(8)).double(), ids(5))
    assert "learnt" in reason(rows, "weyl", "blocks.0.attention")
    assert value(rows, "branch-norm", "blocks.0.attention") > 0


class InPlace(Block):
    def join(self, i: int, x: Tensor) -> Tensor:
        x = x.clone()
        term = self.term(i, x * 1)
        x += term
        return x


def test_in_place_adds_do_not_hide_the_stream() -> None:
    torch.manual_seed(3)
    model = Model(8, lambda: InPlace(8, "pre")).double()
    rows = measure(model, ids(5))
    entry = model.embedding(ids(5)[:1]).detach()
    for site, f in (("blocks.0", model.blocks[0]), ("decoder", model.stack)):
        expected = float(torch.linalg.svdvals(dense(f, entry))[0])
        assert value(rows, "sigma-max", site) == pytest.approx(expected, rel=5e-2)


class WithoutGradient(Block):
    def term(self, i: int, x: Tensor) -> Tensor:
        if i == 0:
            return super().term(i, x)
        with torch.no_grad():
            return super().term(i, x)


def test_a_branch_without_a_path_spoils_its_block_and_the_stack_but_not_its_sibling() -> None:
    model = Model(8, lambda: Block(8, "pre")).double()
    model.blocks[1] = WithoutGradient(8, "pre").double()
    rows = measure(model, ids(5))
    assert value(rows, "branch-norm", "blocks.1.attention") > 0
    assert value(rows, "sigma-max", "blocks.0") > 0
    assert "no path" in reason(rows, "branch-norm", "blocks.1.feed_forward")
    for quantity in ("sigma-max", "dimension"):
        assert "blocks.1.feed_forward" in reason(rows, quantity, "blocks.1")
    for quantity in ("sigma-max", "contraction"):
        assert "blocks.1.feed_forward: no path" in reason(rows, quantity, "decoder")


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.round(4 * x) * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Detached(torch.autograd.Function):
    """Its backward leaves autograd."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.from_numpy(2 * gradient.detach().numpy())


class Custom(Block):
    function: type[torch.autograd.Function]

    def term(self, i: int, x: Tensor) -> Tensor:
        x = self.norms[i](x)
        return self.feed_forward(self.function.apply(x)) if i else self.attention(x)


@pytest.mark.parametrize(
    ("function", "words"), [(StraightThrough, "finite differences"), (Detached, "contradicts Jᵀu")]
)
def test_derivatives_that_are_not_those_of_the_forward_are_refused(function, words: str) -> None:
    class Block(Custom):
        pass

    Block.function = function
    model = Model(8, lambda: Block(8, "pre")).double()
    rows = measure(model, ids(5))
    assert value(rows, "branch-norm", "blocks.0.attention") > 0
    assert words in reason(rows, "branch-norm", "blocks.0.feed_forward")
    assert words in reason(rows, "sigma-max", "decoder")


class Checkpointed(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


def test_checkpointed_blocks_are_measured() -> None:
    torch.manual_seed(4)
    plain = gpt(8, "pre")
    model = Model(8, lambda: Checkpointed(8, "pre")).double()
    model.load_state_dict(plain.state_dict())
    expected, rows = (measure(m, ids(5)) for m in (plain, model))
    for site in ("blocks.0", "blocks.1", "decoder"):
        assert value(rows, "sigma-max", site) == pytest.approx(value(expected, "sigma-max", site))


def test_reentrant_checkpoints_are_not_measured_with_the_reason() -> None:
    rows = measure(Model(8, lambda: Reentrant(8, "pre")).double(), ids(5))
    found = [m for m in rows if m.quantity in ("jacobian/branch-norm", "jacobian/sigma-max")]
    assert found
    assert not any(m.measured for m in found)
    assert "autograd refuses" in reason(rows, "sigma-max", "decoder") or "graph" in reason(
        rows, "sigma-max", "decoder"
    )


def test_values_that_are_not_finite_are_not_measured() -> None:
    model = gpt(8, "pre")
    with torch.no_grad():
        model.blocks[1].feed_forward.down.bias[0] = math.nan
    rows = measure(model, ids(5))
    assert value(rows, "sigma-max", "blocks.0") > 0
    assert "not finite" in reason(rows, "branch-norm", "blocks.1.feed_forward")
    assert "not finite" in reason(rows, "sigma-max", "decoder")


def test_a_half_precision_model_is_measured_in_a_float32_copy() -> None:
    model = gpt(8, "pre").bfloat16()
    rows = measure(model, ids(5))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    twin = gpt(8, "pre")
    twin.load_state_dict(model.state_dict())
    expected = measure(twin.double(), ids(5))
    for site in ("blocks.0", "decoder"):
        assert value(rows, "sigma-max", site) == pytest.approx(value(expected, "sigma-max", site), rel=1e-2)
    assert "in a float32 copy" in rows.find("jacobian/sigma-max", "blocks.0").how


def test_token_major_input_is_cut_along_its_second_axis() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    rows = measure(model, torch.randn(6, 4, 8))
    assert value(rows, "dimension", "layers.0") == 6 * 8
    assert "B = 1" in rows.find("jacobian/sigma-max", "layers.0").how


class OnlyFour(Model):
    def forward(self, ids: Tensor) -> Tensor:
        if len(ids) != 4:
            raise ValueError("four sequences, please")
        return super().forward(ids)


def test_a_model_that_does_not_take_one_sequence_is_measured_on_the_batch() -> None:
    rows = measure(OnlyFour(8, lambda: Block(8, "pre")), ids(5))
    assert value(rows, "dimension", "blocks.0") == 4 * 5 * 8
    assert "whole batch at once, not one sequence: four" in rows.find("jacobian/sigma-max", "blocks.0").how


class EncoderDecoder(nn.Module):
    """Two stacks; the second reads the output of the first."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, d)
        self.encoder = nn.ModuleList(Block(d, "pre") for _ in range(2))
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(d, 2, 2 * d, 0.0, batch_first=True, norm_first=True) for _ in "ab"
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(d), nn.LayerNorm(d)

    def encode(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = block(x)
        return x

    def decode(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.decoder:
            x = block(x, memory)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        memory = self.encoder_norm(self.encode(self.embedding(ids)))
        return self.decoder_norm(self.decode(self.embedding(ids.flip(1)), memory))


def test_each_stack_is_measured_on_its_own_stream() -> None:
    model, batch = EncoderDecoder(8).double(), ids(5)
    subject = subject_of(model, batch)
    anatomy = read_anatomy(subject)
    first, second = (stack.name for stack in anatomy.stacks)
    rows = Measurements(measure_jacobian(subject, anatomy))
    source, target = (model.embedding(t).detach() for t in (batch[:1], batch[:1].flip(1)))
    memory = model.encoder_norm(model.encode(source)).detach()
    maps = {first: (model.encode, source), second: (lambda x: model.decode(x, memory), target)}
    for name, (f, x) in maps.items():
        expected = float(torch.linalg.svdvals(dense(f, x))[0])
        assert value(rows, "sigma-max", name) == pytest.approx(expected, rel=1e-2)


def test_the_model_comes_back_as_it_was() -> None:
    model = Model(8, lambda: Block(8, "pre"))
    model.blocks[1].train(False)
    model.blocks[0].attention.qkv.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    measure(model, ids(5))
    assert torch.equal(torch.rand(3), expected)
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_measuring_twice_gives_the_same() -> None:
    model = gpt(8, "peri")
    assert [m.to_dict() for m in measure(model, ids(5))] == [m.to_dict() for m in measure(model, ids(5))]


def test_a_model_without_stacks_has_no_rows() -> None:
    assert len(measure(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))) == 0
