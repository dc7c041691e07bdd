"""Tests of single rules of the reading, each on the smallest model that needs it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from handwritten_base import WIDTH, Attention, Block, FeedForward, Tower, token_ids
from torch import Tensor, nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.anatomy.axes import name_axes, source_axis
from normscope.anatomy.graph import Value, ancestors
from normscope.anatomy.reading import record_forward


class Sublayer(nn.Module):
    """T5: each branch of a block has a module that also does its add."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(WIDTH), branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class InBlocks(nn.Module):
    """Two sublayers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Sublayer(Attention()), Sublayer(FeedForward())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class AddedInside(nn.Module):
    """BERT: the attention's add is in a submodule of the block, the feed-forward's in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention0, self.feed_forward, self.norm = (
            Sublayer(Attention()),
            FeedForward(),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention0(x)
        return x + self.feed_forward(self.norm(x))


@pytest.mark.parametrize("block", [InBlocks, AddedInside])
def test_sums_in_modules_of_their_own_make_one_block(block: type[nn.Module]) -> None:
    anatomy = read_anatomy(Tower(block(), block()), token_ids())
    assert anatomy.unread == ()
    assert [b.path for b in anatomy.blocks] == ["blocks.0", "blocks.1"]
    assert [[b.kind for b in block.branches] for block in anatomy.blocks] == 2 * [
        ["attention", "feed-forward"]
    ]


class Formula(Block):
    """A block whose norms are a function."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1 = self.norm2 = norm  # type: ignore[assignment]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("norm", "eps"),
    [
        (lambda x: centred(x) / (x.var(-1, keepdim=True) + 1e-3).sqrt(), 1e-3),
        (lambda x: centred(x) / (x.std(-1, keepdim=True) + 1e-3), None),
        (lambda x: x / ((x.square().mean(-1, keepdim=True)).sqrt() + 1e-3), None),
        (lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt(), 1e-3),
        (lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-3) ** 0.5, 1e-3),
        (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-3), None),
        (lambda x: F.layer_norm(x, (WIDTH,), eps=1e-3), 1e-3),
        (lambda x: F.rms_norm(x, (WIDTH,), eps=1e-3), 1e-3),
    ],
)
def test_epsilon_is_read_where_it_stands_under_the_root(
    norm: Callable[[Tensor], Tensor], eps: float | None
) -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = x + layer(norm(x))
            return x

    anatomy = read_anatomy(Model(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(2, 5, WIDTH))
    found = [n for b in anatomy.branches for n in b.norms]
    assert len(found) == 2
    assert [n.eps for n in found] == 2 * [eps if eps is None else pytest.approx(eps)]


def weights_behind(module: nn.Module, x: Tensor, op: str) -> set[str]:
    """Names of the parameters that the last `op` of a forward comes from."""
    graph = record_forward(module, x)
    last = [o for o in graph.ops if o.base == op][-1]
    return {v.name for v in ancestors(last.inputs, -1) if v.origin == "parameter" and v.name is not None}


class Overwrites(nn.Module):
    """Overwrites one row, or all rows, of another map's output."""

    def __init__(self, rows: slice, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rows, self.view = rows, view
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x) * 1.0
        self.view(out)[self.rows] = self.view(self.b(x))[self.rows]
        return F.relu(out)


@pytest.mark.parametrize("view", [lambda x: x, torch.t, torch.flatten])
def test_a_partial_write_keeps_what_was_there_and_a_full_one_hides_it(
    view: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(3, 4)
    assert weights_behind(Overwrites(slice(0, 1), view), x, "relu") == {"a.weight", "b.weight"}
    assert weights_behind(Overwrites(slice(None), view), x, "relu") == {"b.weight"}


class WritesBeside(nn.Module):
    """Writes some rows, then others, and reads a view of the first ones that is older than the writes."""

    def __init__(self, early: slice, later: slice) -> None:
        super().__init__()
        self.early, self.later = early, later
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(3, 3, 4)
        first = out[self.early]
        first.copy_(self.a(x)[None])
        out[self.later].copy_(self.b(x)[None])
        return F.relu(first)


def test_a_write_beside_a_view_does_not_change_it() -> None:
    x = torch.randn(3, 4)
    assert weights_behind(WritesBeside(slice(0, 1), slice(1, 2)), x, "relu") == {"a.weight"}
    assert weights_behind(WritesBeside(slice(0, 1), slice(0, 1)), x, "relu") == {"b.weight"}
    assert weights_behind(WritesBeside(slice(0, 2), slice(1, 3)), x, "relu") == {"a.weight", "b.weight"}


class Only(nn.Module):
    """One function as a model; tests examine its last value."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)  # type: ignore[call-arg]


B, T, D = "batch", "token", "feature"


@pytest.mark.parametrize(
    ("function", "axes"),
    [
        (lambda x, w: x.permute(2, 0, 1).relu(), [{D}, {B}, {T}]),
        (lambda x, w: x.transpose(0, 1).relu(), [{T}, {B}, {D}]),
        (lambda x, w: x.unbind(1)[0].relu(), [{B}, {D}]),
        (lambda x, w: x.unbind(0)[1].relu(), [{T}, {D}]),
        (lambda x, w: x[:, 1].relu(), [{B}, {D}]),
        (lambda x, w: x.flatten(0, 1).relu(), [{B, T}, {D}]),
        (lambda x, w: x.flatten(0, 1).view(2, 3, 5).relu(), [{B}, {T}, {D}]),
        (lambda x, w: x.mean(1).relu(), [{B}, {D}]),
        (lambda x, w: x.mean((0, 2)).relu(), [{T}]),
        (lambda x, w: x.sum(1, keepdim=True).relu(), [{B}, set(), {D}]),
        (lambda x, w: torch.stack([x, x], 1).relu(), [{B}, {"copy"}, {T}, {D}]),
        (lambda x, w: (x @ w).relu(), [{B}, {T}, {D}]),
        (lambda x, w: (x @ w @ w.T).mT.relu(), [{B}, {D}, {T}]),
        (lambda x, w: torch.einsum("de,btd->ebt", w, x).relu(), [{D}, {B}, {T}]),
        (lambda x, w: (x @ x.mT).relu(), [{B}, {T}, {T}]),
        (lambda x, w: ((x @ x.mT) @ x).relu(), [{B}, {T}, {D}]),
        (lambda x, w: (x[:, None] * x[:, :, None]).relu(), [{B}, {T}, {T}, {D}]),
        (lambda x, w: torch.cat([x, x], 1).relu(), [{B}, {T}, {D}]),
        (lambda x, w: F.conv1d(x.mT, w.T[..., None]).relu(), [{B}, {D}, {T}]),
    ],
)
def test_what_each_axis_counts(function: Callable[[Tensor, Tensor], Tensor], axes: list[set[str]]) -> None:
    graph = record_forward(Only(function), torch.randn(2, 3, 5))  # type: ignore[arg-type]
    name_axes(graph.values)
    out = next(op for op in reversed(graph.ops) if op.base == "relu").outputs[0]
    assert [{what for what, _ in axis} for axis in out.axes] == axes


@pytest.mark.parametrize(
    ("view", "sources"),
    [
        (lambda w: w.T, [1, 0]),
        (lambda w: w.permute(1, 0), [1, 0]),
        (lambda w: w.transpose(0, 1), [1, 0]),
        (lambda w: w.view(2, 3, 8), [0, 0, 1]),
        (lambda w: w.unsqueeze(0), [0, 0, 1]),
    ],
)
def test_the_axis_of_a_weight_that_an_axis_of_its_view_was(
    view: Callable[[Tensor], Tensor], sources: list[int]
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return view(self.weight).sum() + x

    graph = record_forward(Model(), torch.randn(1))
    op = next(o for o in graph.ops if o.inputs and o.inputs[0].name == "weight")
    found = [source_axis(op, axis) for axis in range(len(op.outputs[0].shape))]
    assert found[-2:] == sources[-2:]


class SometimesNormed(Tower):
    """Blocks without norms, and a norm on the stream after every second one and after the last."""

    def __init__(self, depth: int) -> None:
        super().__init__(*(NoNorm() for _ in range(depth)), final=nn.Identity())
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))

    def run(self, x: Tensor) -> Tensor:
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            x = block(x)
            x = self.norms[index](x) if index % 2 or index == last else x
        return x


class NoNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


def test_the_last_norm_is_the_stream_s_only_where_most_peers_have_one() -> None:
    anatomy = read_anatomy(SometimesNormed(5), token_ids())
    (stack,) = anatomy.stacks
    assert stack.final_norm is not None
    assert stack.final_norm.path == "norms.4"
    assert [block.branches[-1].placement for block in stack.blocks] == [
        "none",
        "post",
        "none",
        "post",
        "none",
    ]


def test_the_norm_behind_a_single_sum_is_the_stream_s_where_the_branch_has_none() -> None:
    (post,) = read_steps(lambda m, x, f: layer_norm(x + f(x)), depth=1).stacks
    (pre,) = read_steps(lambda m, x, f: layer_norm(x + f(layer_norm(x))), depth=1).stacks
    assert [b.placement for b in (*post.branches, *pre.branches)] == ["post", "pre"]
    assert post.final_norm is None
    assert pre.final_norm is not None


class HalfRaw(Block):
    """Attention with keys and values of the bare stream and queries of its norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), x)
        return x + self.feed_forward(self.norm2(x))


def test_a_branch_that_reads_the_stream_normed_and_raw_is_said() -> None:
    anatomy = read_anatomy(Tower(HalfRaw(), HalfRaw()), token_ids())
    assert any("both with and without a norm" in line for line in anatomy.unread)
    assert [b.placement for b in anatomy.branches] == 2 * ["none", "pre"]
    assert not anatomy.stacks[0].complete


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_norm_of_an_image_is_one_whatever_its_size(size: int) -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.map = nn.GroupNorm(1, WIDTH), nn.Conv2d(WIDTH, WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.map(self.norm(x))

    anatomy = read_anatomy(nn.Sequential(Image(), Image()), torch.randn(2, WIDTH, size, size))
    assert [b.norm for b in anatomy.branches] == ["groupnorm", "groupnorm"]


def test_an_image_is_features_then_tokens() -> None:
    values = record_forward(nn.Identity(), torch.randn(2, 3, 4, 4)).values
    image: Value = next(v for v in values if v.origin == "input")
    name_axes(values)
    assert [{what for what, _ in axis} for axis in image.axes] == [{B}, {D}, {T}, {T}]


class Steps(nn.Module):
    """One step per linear layer, with a learnt number, a learnt vector and a learnt vector per token."""

    def __init__(self, step: Callable[["Steps", Tensor, nn.Module], Tensor], depth: int = 2) -> None:
        super().__init__()
        self.step = step
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.number = nn.Parameter(torch.tensor([0.5]))
        self.vector, self.position = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(5, WIDTH))
        self.mixing = nn.ParameterList(nn.Parameter(torch.rand(5, 5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.step(self, x, layer)
        return x


def read_steps(step: Callable[[Steps, Tensor, nn.Module], Tensor], depth: int = 2) -> Anatomy:
    """The reading of these steps."""
    return read_anatomy(Steps(step, depth), torch.randn(2, 5, WIDTH))


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


@pytest.mark.parametrize(
    "divisor",
    [
        lambda x: x.square().mean(-1, keepdim=True),
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.norm(p=1, dim=-1, keepdim=True),
        lambda x: (x**4).mean(-1, keepdim=True).sqrt(),
        lambda x: x.abs().mean(),
    ],
)
@pytest.mark.parametrize(
    "step",
    [
        lambda x, f, by: x + f(x / by(x)),
        lambda x, f, by: x + f(2 * x * (1 / by(x))),
        lambda x, f, by: x + (y := f(x)) / by(y),
        lambda x, f, by: (y := x + f(x)) / by(y),
    ],
)
def test_a_factor_without_a_root_of_squares_is_no_norm_and_is_not_read(
    step: Callable[..., Tensor], divisor: Callable[[Tensor], Tensor]
) -> None:
    anatomy = read_steps(lambda m, x, f: step(x, f, divisor))
    assert {b.norm for b in anatomy.branches} <= {"none"}
    assert any("a factor that is computed from it: it is no known norm" in line for line in anatomy.unread)
    assert not any(stack.complete for stack in anatomy.stacks)


@pytest.mark.parametrize(
    "inner",
    [
        lambda h: h * torch.sigmoid(h.mean(-1, keepdim=True)),
        lambda h: h.exp() / h.exp().sum(-1, keepdim=True),
        lambda h: h / h.abs().amax(-1, keepdim=True),
    ],
)
def test_a_factor_inside_of_a_branch_is_no_gap(inner: Callable[[Tensor], Tensor]) -> None:
    anatomy = read_steps(lambda m, x, f: x + f(inner(f(layer_norm(x)))))
    assert anatomy.unread == ()
    assert [(b.placement, b.norm) for b in anatomy.branches] == 2 * [("pre", "layernorm")]


@pytest.mark.parametrize(
    "gate",
    [
        lambda m, y: torch.sigmoid(y @ m.vector)[..., None],
        lambda m, y: torch.sigmoid((y * m.vector).sum(-1, keepdim=True)),
    ],
)
def test_a_learnt_gate_of_a_token_is_no_gap(gate: Callable[["Steps", Tensor], Tensor]) -> None:
    def step(m: Steps, x: Tensor, f: nn.Module) -> Tensor:
        y = layer_norm(x)
        return x + f(y) * gate(m, y)

    def scaled_stream(m: Steps, x: Tensor, f: nn.Module) -> Tensor:
        return x + f(x * gate(m, x))

    assert read_steps(step).unread == read_steps(scaled_stream).unread == ()


def test_a_mask_from_the_input_on_the_stream_is_no_gap() -> None:
    class Masked(Tower):
        def forward(self, ids: Tensor) -> Tensor:
            mask, x = ids != 0, self.tokens(ids)
            for block in self.blocks:
                x = block(x) * mask[..., None].to(x.dtype)
            return self.head(self.final(x))

    anatomy = read_anatomy(Masked(Block(), Block()), token_ids())
    assert anatomy.unread == ()
    assert [b.placement for b in anatomy.branches] == 4 * ["pre"]


def test_centred_and_divided_by_the_root_mean_square_is_no_layernorm() -> None:
    anatomy = read_steps(
        lambda m, x, f: x + f(centred(x) / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    )
    assert "layernorm" not in {b.norm for b in anatomy.branches}
    assert anatomy.unread


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_one_plus_gamma_has_the_offset_one(offset: float) -> None:
    gain = (lambda m: 1.0 + m.vector) if offset else (lambda m: m.vector)
    anatomy = read_steps(lambda m, x, f: x + f(F.rms_norm(x, (WIDTH,)) * gain(m)))
    norms = [n for b in anatomy.branches for n in b.norms]
    assert [(n.kind, n.weight, n.weight_offset) for n in norms] == 2 * [("rmsnorm", "vector", offset)]


def test_positions_behind_a_norm_are_no_beta() -> None:
    anatomy = read_steps(lambda m, x, f: x + f(layer_norm(x) + m.position))
    plain = read_steps(lambda m, x, f: x + f(layer_norm(x) + m.vector))
    assert {n.output.op for b in anatomy.branches for n in b.norms} == {"aten.native_layer_norm.default"}
    assert {n.output.op for b in plain.branches for n in b.norms} == {"aten.add.Tensor"}


def test_a_product_of_another_shape_is_no_gamma() -> None:
    anatomy = read_steps(lambda m, x, f: x + f((layer_norm(x) * m.position[:, None, None]).mean(0)))
    assert {n.output.op for b in anatomy.branches for n in b.norms} == {"aten.native_layer_norm.default"}
    assert {n.weight for b in anatomy.branches for n in b.norms} == {None}


def test_tokens_mixed_twice_are_still_tokens() -> None:
    """The norm after a map over tokens is over features, because that map makes no features."""

    class Mixer(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.norm1(self.attention(x.mT).mT)
            return x + self.norm2(self.feed_forward(x))

    anatomy = read_anatomy(Tower(*(Mixer(FeedForward(8)) for _ in range(2))), token_ids())
    assert [(b.kind, b.placement, b.norm) for b in anatomy.branches] == 2 * [
        ("other", "res-post", "layernorm"),
        ("feed-forward", "res-post", "layernorm"),
    ]


def test_the_first_learnt_map_makes_the_features() -> None:
    """Series of shape (B, T, variates), embedded along T: the variates are the tokens."""

    class Inverted(Steps):
        def __init__(self) -> None:
            super().__init__(lambda m, x, f: x + f(layer_norm(x)))
            self.embed = nn.Linear(9, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.embed(x.mT))

    anatomy = read_anatomy(Inverted(), torch.randn(2, 9, 5))
    assert [(b.kind, b.norm) for b in anatomy.branches] == 2 * [("feed-forward", "layernorm")]


def test_a_mask_of_several_values_is_no_number() -> None:
    shares = torch.linspace(0.5, 1.5, WIDTH)
    anatomy = read_steps(lambda m, x, f: x + f(layer_norm(x)) * shares)
    assert {b.branch_scale for b in anatomy.branches} == {None}
    halves = read_steps(lambda m, x, f: x + f(layer_norm(x)) * torch.full((WIDTH,), 0.5))
    assert {b.branch_scale for b in halves.branches} == {0.5}


def test_one_learnt_number_is_no_layerscale() -> None:
    one = read_steps(lambda m, x, f: x + m.number * f(layer_norm(x)))
    many = read_steps(lambda m, x, f: x + m.vector * f(layer_norm(x)))
    assert {b.scheme for b in one.branches} == {None}
    assert {b.scheme for b in many.branches} == {"layerscale"}


def test_a_branch_that_is_subtracted_has_the_scale_minus_one() -> None:
    anatomy = read_steps(lambda m, x, f: x - f(layer_norm(x)))
    assert {(b.stream_scale, b.branch_scale) for b in anatomy.branches} == {(None, -1.0)}


def test_a_lerp_by_a_number_has_two_scales() -> None:
    anatomy = read_steps(lambda m, x, f: torch.lerp(x, f(layer_norm(x)), 0.25))
    assert {(b.stream_scale, b.branch_scale) for b in anatomy.branches} == {(0.75, 0.25)}


def test_a_stream_that_is_doubled_goes_on() -> None:
    def step(m: Steps, x: Tensor, f: nn.Module) -> Tensor:
        x = 0.5 * x + m.number * x
        return x + f(layer_norm(x))

    anatomy = read_steps(step, depth=3)
    assert anatomy.unread == ()
    assert [(len(s.blocks), len(s.long_skips)) for s in anatomy.stacks] == [(3, 0)]


def test_the_norm_behind_a_doubled_stream_is_final() -> None:
    class Doubled(Tower):
        def run(self, x: Tensor) -> Tensor:
            x = super().run(x)
            return 0.5 * x + 0.25 * x

    anatomy = read_anatomy(Doubled(Block(), Block()), token_ids())
    assert anatomy.unread == ()
    assert anatomy.final_norm


@pytest.mark.parametrize("shape", [(2, 5, WIDTH), (5, WIDTH)])
@pytest.mark.parametrize("first", [False, True])
def test_the_feature_axis_of_a_weight_on_either_side(first: bool, shape: tuple[int, ...]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.rand(32, 16)), nn.Parameter(torch.rand(16, 32))

        def forward(self, x: Tensor) -> Tensor:
            y = layer_norm(x)
            if first:
                return x + (self.down @ (self.up @ y.mT).relu()).mT
            return x + (y @ self.up.T).relu() @ self.down.T

    (branch,) = read_anatomy(Model(), torch.randn(shape)).branches
    assert [(p.parameter, p.feature_axis) for p in branch.projections] == [("up", 0), ("down", 0)]


@pytest.mark.parametrize("rounds", [1, 2])
def test_lists_of_branches_run_by_one_loop_make_blocks(rounds: int) -> None:
    class Lists(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.attns = nn.ModuleList(Attention() for _ in range(2))
            self.ffs = nn.ModuleList(FeedForward() for _ in range(2))

        def run(self, x: Tensor) -> Tensor:
            for attention, feed_forward in rounds * list(zip(self.attns, self.ffs, strict=True)):
                x = x + attention(layer_norm(x))
                x = x + feed_forward(layer_norm(x))
            return x

    anatomy = read_anatomy(Lists(), token_ids())
    assert [[b.kind for b in block.branches] for block in anatomy.blocks] == 2 * rounds * [
        ["attention", "feed-forward"]
    ]
    assert [(block.path, block.call) for block in anatomy.blocks] == [
        (f"attns.{index}", call) for call in range(rounds) for index in range(2)
    ]


def test_a_flat_list_without_a_period_is_one_block_a_branch() -> None:
    class Flat(Tower):
        def __init__(self) -> None:
            super().__init__(Attention(), FeedForward(), FeedForward(), Attention())

        def run(self, x: Tensor) -> Tensor:
            for branch in self.blocks:
                x = x + branch(layer_norm(x))
            return x

    anatomy = read_anatomy(Flat(), token_ids())
    assert [[b.kind for b in block.branches] for block in anatomy.blocks] == [
        *(["attention"], ["feed-forward"], ["feed-forward"], ["attention"])
    ]


class Memory(nn.Module):
    """A stack without attention, and one that attends to it through its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, WIDTH)
        self.reader, self.writer = (nn.ModuleList(FeedForward() for _ in range(2)) for _ in range(2))
        self.cross = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.tokens(source), self.tokens(target)
        for feed_forward in self.reader:
            memory = memory + feed_forward(layer_norm(memory))
        for cross, feed_forward in zip(self.cross, self.writer, strict=True):
            x = x + cross(layer_norm(x), layer_norm(memory))
            x = x + feed_forward(layer_norm(x))
        return layer_norm(x)


def test_a_stack_that_attends_to_another_is_a_decoder() -> None:
    ids = torch.randint(0, 32, (2, 6)), torch.randint(0, 32, (2, 5))
    anatomy = read_anatomy(Memory(), ids)
    assert [stack.name for stack in anatomy.stacks] == ["encoder", "decoder"]
    assert [[b.kind for b in block.branches] for block in anatomy.stacks[1].blocks] == 2 * [
        ["cross-attention", "feed-forward"]
    ]


def test_the_entry_norm_of_the_next_stack_is_no_final_norm() -> None:
    class Two(Tower):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.short = nn.ModuleList(Block() for _ in range(2))

        def run(self, x: Tensor) -> Tensor:
            x = super().run(x)[:, ::2]
            for block in self.short:
                x = block(x)
            return x

    first, second = read_anatomy(Two(), token_ids()).stacks
    assert first.final_norm is None
    assert second.final_norm is not None
    assert second.final_norm.path == "final"


class GRUGated(Block):
    """The stream is the hidden state of a GRU cell that reads the branch, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.join_by(0, x, self.attention(self.norm1(x)))
        return self.join_by(1, x, self.feed_forward(self.norm2(x)))

    def join_by(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        return self.gates[index](y.flatten(0, 1), x.flatten(0, 1)).view_as(x)


class HandLerp(Block):
    """x + z·(F(x) − x) with a gate z or a learnt share."""

    def __init__(self, learnt: bool) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.full((WIDTH,), 0.5)) if learnt else nn.Linear(WIDTH, WIDTH)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        share = self.share if isinstance(self.share, nn.Parameter) else torch.sigmoid(self.share(x))
        return x + share * (y - x)


@pytest.mark.parametrize(
    ("block", "join"),
    [(GRUGated, "gate"), (lambda: HandLerp(False), "gate"), (lambda: HandLerp(True), "learnt")],
)
def test_a_lerp_by_hand_joins_as_a_gate_does(block: Callable[[], Block], join: str) -> None:
    anatomy = read_anatomy(Tower(block(), block()), token_ids())
    assert anatomy.unread == ()
    assert [(b.kind, b.placement, b.join) for b in anatomy.branches] == 2 * [
        ("attention", "pre", join),
        ("feed-forward", "pre", join),
    ]
    assert {(b.stream_scale, b.branch_scale) for b in anatomy.branches} == {("learnt", "learnt")}


class ValueResidual(Tower):
    """Every attention mixes its values with those of the first block, by a learnt share."""

    def __init__(self, depth: int) -> None:
        super().__init__(*(Block() for _ in range(depth)))
        self.shares = nn.Parameter(torch.full((depth,), 0.5))

    def run(self, x: Tensor) -> Tensor:
        first: Tensor | None = None
        for share, block in zip(self.shares, self.blocks, strict=True):
            y, a = block.norm1(x), block.attention
            q, k, v = (a.heads(p(y)) for p in (a.q, a.k, a.v))
            first = v if first is None else first
            v = (1 - share) * v + share * first
            x = x + a.o(a.mix(q, k, v).transpose(1, 2).flatten(2))
            x = x + block.feed_forward(block.norm2(x))
        return x


def test_values_mixed_with_those_of_the_first_block_are_no_stream() -> None:
    anatomy = read_anatomy(ValueResidual(3), token_ids())
    assert anatomy.unread == ()
    assert [[(b.kind, b.placement) for b in block.branches] for block in anatomy.blocks] == 3 * [
        [("attention", "pre"), ("feed-forward", "pre")]
    ]
    assert [block.path for block in anatomy.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
