"""Joins that are more than a sum: each against its paper's formula written out in float64, and what its paper
says of its start.

Shapes: B batch, T tokens, n streams, D width.
"""

import copy
import dataclasses
import math
from functools import partial

import dense
import pytest
import torch
import torch.nn.functional as F
from references import REFERENCES, Map, Sub
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn import (
    Block,
    Join,
    ModelConfig,
    Residual,
    Slot,
    Where,
    build,
    profile_admin,
    scheme_named,
)
from normscope.nn.block import sublayer_places
from normscope.nn.joins import Site
from normscope.nn.schemes.admin import AdminSum
from normscope.nn.schemes.fixup import num_branches, t_fixup_gain
from normscope.nn.schemes.hyper_connections import KroneckerFactors, Mixing, Permutations, sinkhorn

WIDTH = 6
SMALL = {"width": 16, "heads": 2, "vocab": 11, "context": 16}
STREAMS = [
    *("admin", "rezero", "skipinit", "fixup", "layerscale", "residual-dual", "b2t", "gpas"),
    *("siamesenorm", "parallel", "gtrxl", "highway", "hyper-connections", "mhc", "mhc-lite", "kromhc"),
    *("attnres", "block-attnres", "nanochat"),
]
names = pytest.mark.parametrize("name", STREAMS)

PLACES = [where for block in (1, 2) for where in sublayer_places(Where(block, depth=2), cross=False).values()]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shaken(module: nn.Module) -> nn.Module:
    """Float64, with every parameter changed from its initial value."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def chain(name: str, *, cross: bool = False) -> tuple[Join, list[Residual], list[Sub]]:
    """The residuals of two blocks around small random branches."""
    scheme = scheme_named(name)
    residuals: list[Residual] = []
    subs: list[Sub] = []
    for block in (1, 2):
        for where in sublayer_places(Where(block, depth=2), cross=cross).values():
            residual = shaken(Residual(scheme, where, WIDTH))
            assert isinstance(residual, Residual)
            weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
            norms = [
                partial(dense.norm, residual.norms[slot]) for slot in ("branch_in", "branch_out", "stream")
            ]
            branch = lambda x, w=weight: torch.sin(x @ w)  # noqa: E731
            residuals.append(residual)
            subs.append(Sub(block, 2, where.sublayer, where.kind, branch, *norms, residual.join))
    return scheme.join, residuals, subs


def run(join: Join, residuals: list[Residual], subs: list[Sub], x: Tensor, entry: Map, final: Map) -> Tensor:
    state = join.enter(x, entry)
    for residual, sub in zip(residuals, subs, strict=True):
        state = residual(state, sub.F)
    return join.leave(state, final)


def same(x: Tensor) -> Tensor:
    return x


@names
def test_a_join_is_its_formula_beside_cross_attention(name: str) -> None:
    join, residuals, subs = chain(name, cross=True)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    held = scheme_named(name).placement_at(Where(1, depth=2))
    entry, final = (
        partial(dense.norm, shaken(nn.LayerNorm(WIDTH))) if slot in held else same
        for slot in (Slot.ENTRY, Slot.FINAL)
    )
    found, expected = run(join, residuals, subs, x, entry, final), REFERENCES[name](subs, x, entry, final)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@names
def test_a_reference_sees_each_parameter_of_the_join(name: str) -> None:
    """Every parameter has an effect; else a useless one would pass."""
    _, residuals, subs = chain(name)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    before = REFERENCES[name](subs, x, same, same)
    for parameter in residuals[1].join.parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        assert not torch.allclose(REFERENCES[name](subs, x, same, same), before, rtol=1e-9)
        with torch.no_grad():
            parameter.copy_(kept)


@names
def test_between_blocks_a_single_stream_is_a_tensor(name: str) -> None:
    """A block's output can be checkpointed, and read by tools that know one stream."""
    join, residuals, subs = chain(name, cross=True)
    state = join.enter(torch.randn(1, 2, WIDTH, dtype=torch.float64), same)
    for residual, sub in zip(residuals[:3], subs[:3], strict=True):
        state = residual(state, sub.F)
    in_tuples = ("residual-dual", "siamesenorm", "attnres", "block-attnres", "nanochat")
    assert isinstance(state, Tensor) == (name not in in_tuples)


@names
def test_every_parameter_learns(name: str) -> None:
    """Zero initial values may hide parameters in the first step; by the third all but the key's bias move."""
    model = build("decoder", scheme=name, depth=2, **SMALL)
    start = copy.deepcopy(model.state_dict())
    ids, labels = torch.randint(11, (2, 7)), torch.randint(11, (2, 7))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        model(ids, labels).loss.backward()
        optimiser.step()
    still = [path for path, value in model.state_dict().items() if torch.equal(value, start[path])]
    assert all(path.endswith(".k.bias") for path in still)  # softmax does not see it


@pytest.mark.parametrize("name", ["rezero", "skipinit", "fixup"])
def test_a_block_with_closed_branches_is_the_identity(name: str) -> None:
    x = torch.randn(2, 5, 16)
    model = build("decoder", scheme=name, depth=2, **SMALL)
    assert torch.equal(model.run(x), x)


@pytest.mark.parametrize(
    "name",
    [
        "residual-dual",
        "siamesenorm",
        "b2t",
        "parallel",
        "hyper-connections",
        "mhc",
        "mhc-lite",
        "kromhc",
        "attnres",
        "nanochat",
    ],
)
def test_one_stream_is_not_taken_for_several(name: str) -> None:
    """Else a batch of two would unpack into sequences, and four tokens would pass as four streams."""
    residual = Residual(scheme_named(name), Where(1, depth=4, index=1), WIDTH)
    with pytest.raises(UsageError, match=r"stream of shape \(2, 4, 6\).*join.enter"):
        residual(torch.randn(2, 4, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("num_streams", [1, 2, 4, 5])
def test_hyper_connections_start_as_n_pre_streams(num_streams: int) -> None:
    """Catalogue row 13: exactly, up to the factor n of the sum."""
    _, pre, subs = chain("pre")
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    scheme = scheme_named("hyper-connections")
    join = dataclasses.replace(scheme.join, num_streams=num_streams)
    scheme = dataclasses.replace(scheme, join=join)
    hyper = [Residual(scheme, where, WIDTH).double() for where in PLACES]
    for residual, other in zip(hyper, pre, strict=True):
        residual.norms.load_state_dict(other.norms.state_dict())
    expected = num_streams * run(scheme_named("pre").join, pre, subs, x, same, same)
    torch.testing.assert_close(run(join, hyper, subs, x, same, same), expected, rtol=1e-13, atol=1e-13)


def test_attention_residuals_start_as_means() -> None:
    """Zero queries: h of branch l is the mean of the embedding and the outputs before it."""
    join, _, subs = chain("attnres")
    fresh = [Residual("attnres", where, WIDTH, norm="none").double() for where in PLACES]
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    state, outputs = join.enter(x, same), [x]
    for residual, sub in zip(fresh, subs, strict=True):
        outputs.append(sub.F(state[0]))
        state = residual(state, sub.F)
        torch.testing.assert_close(state[0], torch.stack(outputs).mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("depth", "outputs"), [(2, 3), (8, 9), (9, 6), (16, 9), (20, 8)])
def test_block_attention_residuals_have_eight_sums_at_most(depth: int, outputs: int) -> None:
    """The state holds h, the embedding and the sums over ⌈L/8⌉ blocks."""
    model = build("decoder", scheme="block-attnres", depth=depth, **SMALL)
    state = model.scheme.join.enter(torch.randn(1, 2, 16), same)
    for block in model.blocks:
        state = block(state)
    assert len(state) == 1 + outputs


def test_nanochat_starts_as_in_its_code() -> None:
    model = build("decoder", scheme="nanochat", depth=5, **SMALL)
    joins = [block.attention_residual.join for block in model.blocks]
    expected = torch.tensor([[1.15, 1.125, 1.1, 1.075, 1.05], [0.2, 0.1625, 0.125, 0.0875, 0.05]])
    found = torch.stack([torch.cat([j.stream_scale, j.embedding_scale]) for j in joins], dim=1)
    torch.testing.assert_close(found, expected)
    assert all(
        not block.attention.o.weight.any() and not block.feed_forward.down.weight.any()
        for block in model.blocks
    )
    assert all(block.feed_forward_residual.join.stream_scale is None for block in model.blocks)
    norms = [norm for block in model.blocks for norm in (block.attention.q_norm, block.attention.k_norm)]
    assert {type(norm).__name__ for norm in norms} == {"RMSNorm"}


def test_sublayer_k_first_reads_stream_k_mod_n() -> None:
    _, residuals, _ = chain("hyper-connections", cross=True)
    fresh = [
        Residual(scheme_named("hyper-connections"), w, WIDTH).join
        for block in (1, 2)
        for w in sublayer_places(Where(block, depth=2), cross=True).values()
    ]
    assert [join.mix[:, 0].argmax().item() for join in fresh] == [0, 1, 2, 3, 0, 1]
    assert len(residuals) == 6


def test_mhc_starts_as_pre() -> None:
    """The match is exact with mHC's dynamic parts at zero, and close as initialised."""
    _, pre, subs = chain("pre")
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    scheme = scheme_named("mhc")
    manifold = [Residual(scheme, where, WIDTH, eps=1e-14).double() for where in PLACES]
    for residual, other in zip(manifold, pre, strict=True):
        residual.norms.load_state_dict(other.norms.state_dict())
        other.norms["branch_in"].eps = 1e-14
    expected = run(scheme_named("pre").join, pre, subs, x, same, same)
    near = run(scheme.join, manifold, subs, x, same, same)
    assert 1e-6 < (near - expected).norm() / expected.norm() < 0.1
    for residual in manifold:
        nn.init.zeros_(residual.join.scales)
    exact = run(scheme.join, manifold, subs, x, same, same)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)


def test_what_hangs_on_the_input_starts_small() -> None:
    """s = 0.01 as in both papers; else the first steps would mix the streams by the input alone."""
    hyper, manifold = (Residual(name, Where(1, depth=2), WIDTH).join for name in ("hyper-connections", "mhc"))
    scales = torch.cat([hyper.mix_scale, hyper.write_scale, manifold.scales])
    assert torch.equal(scales, torch.full((5,), 0.01))


def test_sinkhorn_is_doubly_stochastic() -> None:
    mixed = sinkhorn(torch.randn(5, 3, 4, 4, dtype=torch.float64), 20)
    assert (mixed > 0).all()
    torch.testing.assert_close(mixed.sum(-1), torch.ones(5, 3, 4, dtype=torch.float64), rtol=1e-14, atol=0)
    torch.testing.assert_close(mixed.sum(-2), torch.ones(5, 3, 4, dtype=torch.float64), rtol=1e-4, atol=0)
    assert (sinkhorn(torch.randn(4, 4) * 3, 1).sum(0) - 1).abs().max() > 1e-3  # one step is not enough


@pytest.mark.parametrize("mixing", [Permutations(4), KroneckerFactors(4), KroneckerFactors(8)])
def test_mixing_by_construction_is_doubly_stochastic_and_starts_near_the_identity(mixing: Mixing) -> None:
    start = mixing.identity().double()
    mixed = mixing(3 * torch.randn(5, 3, len(start), dtype=torch.float64))
    ones = torch.ones(5, 3, mixing.num_streams, dtype=torch.float64)
    assert (mixed > 0).all()
    for dim in (-1, -2):
        torch.testing.assert_close(mixed.sum(dim), ones, rtol=1e-6, atol=0)
    near = mixing(start) - torch.eye(mixing.num_streams)
    assert 0 < near.abs().max() < 0.02


@pytest.mark.parametrize("name", ["mhc-lite", "kromhc"])
def test_a_stream_is_read_and_written_first(name: str) -> None:
    """σ(1) and 2σ(1) for stream k mod n, σ(−1) and 2σ(−1) for the others, as in the authors' code."""
    join = scheme_named(name).join.build(Site(Where(2, depth=2), WIDTH, nn.LayerNorm))
    read, write, _ = join.connections(torch.randn(1, 1, 4, WIDTH))
    expected = torch.sigmoid(torch.tensor([-1.0, -1.0, 1.0, -1.0]))
    torch.testing.assert_close(read.flatten(), expected)
    torch.testing.assert_close(write.flatten(), 2 * expected)


def test_sinkhorn_bears_large_logits() -> None:
    logits = (200 * torch.randn(4, 4)).requires_grad_()
    mixed = sinkhorn(logits, 20)
    torch.testing.assert_close(mixed.sum(-1), torch.ones(4))
    mixed.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_mhc_weighs_streams_in_float32_under_half_precision() -> None:
    """Only the result is rounded, not the steps of Sinkhorn."""
    half = scheme_named("mhc").join.build(Site(Where(1, depth=2), 16, nn.LayerNorm)).bfloat16()
    nn.init.normal_(half.scales)
    h = torch.randn(2, 3, 4, 16).bfloat16()
    wide = copy.deepcopy(half).float().connections(h.float())
    for ours, theirs in zip(half.connections(h), wide, strict=True):
        assert torch.equal(ours, theirs.bfloat16())


@pytest.mark.parametrize("name", ["highway", "gtrxl"])
def test_a_gate_starts_open_for_the_stream(name: str) -> None:
    """Most of the stream passes, and so does the gradient."""
    residual = Residual(scheme_named(name), Where(1, depth=2), 64)
    x, f = torch.randn(8, 4, 64, requires_grad=True), torch.randn(8, 4, 64)
    out = residual(x, lambda _: f)
    passed = ((out - f) * (x - f)).sum() / (x - f).square().sum() if name == "highway" else (out * x).mean()
    assert 0.8 < passed < 1.1
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert 0.7 < gradient.mean() < 1.1


def test_gtrxl_reads_no_negative_update() -> None:
    residual = Residual(scheme_named("gtrxl"), Where(1), WIDTH)
    x = torch.randn(2, 3, WIDTH)
    below = [residual(x, lambda x, c=c: c * x.abs()) for c in (0.0, -1.0, 1.0)]
    assert torch.equal(below[0], below[1])
    assert not torch.allclose(below[0], below[2])


def test_gpas_scales_the_stream_and_not_its_gradient() -> None:
    residual = Residual(scheme_named("gpas"), Where(1), WIDTH).double()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)

    def value_and_gradient() -> tuple[Tensor, Tensor]:
        y = residual(x, torch.sin)
        return y, torch.autograd.grad((weight * y).sum(), x)[0]

    plain, gradient = value_and_gradient()
    nn.init.constant_(residual.join.gate, 1.5)
    scaled, same = value_and_gradient()
    torch.testing.assert_close(scaled, (1 - 1.5 / (1 + math.exp(-1.5))) * plain)
    torch.testing.assert_close(same, gradient, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("depth", "start"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layerscale_starts_by_depth(depth: int, start: float) -> None:
    residual = Residual(scheme_named("layerscale"), Where(1, depth=depth), WIDTH)
    assert torch.equal(residual.join.scale, torch.full((WIDTH,), start))


@pytest.mark.parametrize("name", ["layerscale", "admin"])
def test_a_start_by_depth_needs_the_depth(name: str) -> None:
    with pytest.raises(UsageError, match=f'scheme "{name}" without depth'):
        Residual(scheme_named(name), Where(1), WIDTH)


def test_fixup_counts_the_branches_of_both_stacks() -> None:
    encoder = Where(1, depth=2, stack="encoder", other_depth=3)
    decoder = Where(1, depth=3, stack="decoder", other_depth=2, per_block=3)
    assert num_branches(encoder) == num_branches(decoder) == 2 * 2 + 3 * 3
    assert num_branches(Where(1, depth=5)) == 10


def _stds(name: str, depth: int) -> dict[str, float]:
    """Standard deviations of a block's weights in units of Xavier's, of the embedding in units of d^-½."""
    model = build("decoder", scheme=name, depth=depth, width=128, heads=2, vocab=256)
    block = model.blocks[0]
    maps = {role: getattr(block.attention, role) for role in "qkvo"}
    maps |= {role: getattr(block.feed_forward, role) for role in ("up", "down")}
    stds = {
        role: m.weight.std().item() / math.sqrt(2 / (m.in_features + m.out_features))
        for role, m in maps.items()
    }
    return stds | {"embedding": model.embedding.tokens.weight.std().item() * 128**0.5}


def test_fixup_starts_as_its_paper_says() -> None:
    stds = _stds("fixup", 8)
    wide, narrow = 16 ** (-1 / 6), 16 ** (-1 / 2)
    expected = {"q": wide, "k": wide, "v": wide, "o": 0, "up": narrow, "down": 0, "embedding": 1}
    assert stds == pytest.approx(expected, rel=0.03)


def test_t_fixup_starts_as_its_paper_says() -> None:
    stds = _stds("t-fixup", 8)
    gain = 0.67 * 8**-0.25
    scaled = dict.fromkeys(("v", "o", "up", "down"), gain)
    assert stds == pytest.approx(scaled | {"q": 1, "k": 1, "embedding": (9 * 8) ** -0.25}, rel=0.03)
    assert t_fixup_gain(Where(1, depth=8, per_block=3)) == pytest.approx((9 * 8) ** -0.25)


@pytest.mark.parametrize(("cross", "branches"), [(False, 12), (True, 18)])
def test_admin_starts_with_its_closed_form(cross: bool, branches: int) -> None:
    block = Block(ModelConfig(scheme="admin", width=16, heads=2), Where(1, depth=6), causal=True, cross=cross)
    omega = math.sqrt((branches + 1) / math.log(branches + 1) - 1)
    for _, residual in block.sublayers().values():
        torch.testing.assert_close(residual.join.omega, torch.full((16,), omega))


def test_admin_profile_against_a_hand_computation() -> None:
    model = build("decoder", scheme="admin", depth=3, **SMALL).double()
    ids = torch.randint(11, (4, 9))
    x = model.embedding(ids, torch.arange(9)[None])
    total, expected = 1.0, []
    for block in model.blocks:
        for branch, residual in block.sublayers().values():
            f = branch(x)
            expected.append(math.sqrt(total))
            x = dense.norm(residual.norms["stream"], expected[-1] * x + f)
            total += f.var(correction=0).item()
    profile_admin(model, ids)
    found = [m.omega for m in model.modules() if isinstance(m, AdminSum)]
    torch.testing.assert_close(
        torch.stack(list(found)), torch.tensor(expected, dtype=torch.float64)[:, None].expand(-1, 16)
    )
    assert expected[0] == 1 < expected[1] < expected[-1]
    torch.testing.assert_close(model(ids).logits, model.head(x))  # and the hooks are gone


def test_admin_profile_makes_the_stack_add_up_as_pre_does() -> None:
    """ω_i undoes the norm before it: the output points where x_1 + ΣF_j does, not along the last branches."""
    model = build("encoder", scheme="admin", depth=8, width=64, heads=2, vocab=11).double()
    x = F.layer_norm(torch.randn(16, 12, 64, dtype=torch.float64), (64,))

    def agreement() -> float:
        out, total = x, x
        for block in model.blocks:
            for branch, residual in block.sublayers().values():
                total = total + branch(out)
                out = residual(out, branch)
        return F.cosine_similarity(out, total, dim=-1).mean().item()

    for join in (m for m in model.modules() if isinstance(m, AdminSum)):
        nn.init.ones_(join.omega)
    assert agreement() < 0.9
    profile_admin(model, torch.randint(11, (16, 12)))
    assert agreement() > 0.97


def test_admin_profile_sums_each_stack_by_itself() -> None:
    model = build("encoder-decoder", scheme="admin", depth=2, **SMALL)
    ids = torch.randint(11, (2, 7))
    profile_admin(model, (ids, ids))
    first = {j.stack: j for j in reversed([m for m in model.modules() if isinstance(m, AdminSum)])}
    assert set(first) == {"encoder", "decoder"}
    assert all(torch.equal(join.omega, torch.ones(16)) for join in first.values())


def test_admin_profile_takes_what_the_model_is_called_with() -> None:
    model = build("decoder", scheme="admin", depth=2, **SMALL)
    ids = torch.randint(11, (2, 7))
    found = []
    for batch in (ids, (ids, ids), {"ids": ids, "labels": ids}):
        profile_admin(model, batch)
        found.append(model.blocks[1].attention_residual.join.omega.clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_admin_profile_refuses_what_it_cannot_profile() -> None:
    ids = torch.randint(11, (2, 7))
    with pytest.raises(UsageError, match="without Admin's ω"):
        profile_admin(build("decoder", scheme="post", depth=2, **SMALL), ids)
    model = build("decoder", scheme="admin", depth=2, **SMALL)
    before = copy.deepcopy(model.state_dict())
    nn.init.constant_(model.blocks[1].feed_forward.down.bias, float("inf"))
    with pytest.raises(UsageError, match="not finite"):
        profile_admin(model, ids)
    after = model.state_dict()
    assert all(torch.equal(after[path], before[path]) for path in before if path.endswith("omega"))


def _output_change(scheme: str, depth: int, *, profiled: bool = False) -> float:
    """Mean square of the change of the last state when every weight is 1 % off, over six models."""
    changes = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = build("decoder", scheme=scheme, depth=depth, width=64, heads=4, vocab=64, activation="relu")
        ids = torch.randint(64, (4, 16))
        if profiled:
            profile_admin(model, ids)
        with torch.no_grad():
            x = model.embedding(ids, torch.arange(16)[None])
            before = model.run(x)
            for linear in (m for b in model.blocks for m in b.modules() if isinstance(m, nn.Linear)):
                linear.weight.add_(0.01 * linear.weight.std() * torch.randn_like(linear.weight))
            changes.append((model.run(x) - before).square().mean().item())
    return sum(changes) / 6


def test_admin_calms_the_output_under_weight_noise() -> None:
    """Catalogue row 8: the change grows with the depth in Post-LN, slower under Admin, profiled or not."""
    shallow, deep = _output_change("post", 3), _output_change("post", 12)
    assert deep > 2.5 * shallow
    for profiled in (False, True):
        calm = _output_change("admin", 12, profiled=profiled)
        assert calm / _output_change("admin", 3, profiled=profiled) < deep / shallow
        assert calm < deep / 2


def test_schemes_of_one_dataflow_read_as_one() -> None:
    assert scheme_named("skipinit").reads_as == "rezero"
    assert scheme_named("t-fixup").reads_as == "residual-no-norm"
    assert Slot.FINAL not in scheme_named("rezero").placement_at(Where(1))
