"""Tests of recording, capture and measuring, and of every site of three models."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Site, capture, measuring, read_anatomy
from normscope.anatomy.reading import record_forward


def encoder(norm_first: bool = False, final: bool = False, depth: int = 3) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    norm = nn.LayerNorm(16) if final else None
    return nn.TransformerEncoder(layer, depth, norm=norm, enable_nested_tensor=False)


def all_sites(anatomy: Anatomy) -> list[Site]:
    sites = [stack.hidden for stack in anatomy.stacks]
    for block in anatomy.blocks:
        sites += [block.entry, block.exit]
    for branch in anatomy.branches:
        sites += [branch.entry, branch.output, branch.sum]
        sites += [site for norm in branch.norms for site in (norm.input, norm.output)]
        sites += [projection.output for projection in branch.projections]
        for a in branch.attention:
            sites += [a.query, a.key, a.value, a.logits, a.probabilities]
    return sites


def seen_by_hooks(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output of every module, by path."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda m, i, out, name=name: seen.setdefault(name, out))
        for name, module in model.named_modules()
    ]
    with measuring(model):
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def test_post_ln_encoder_is_read_to_the_last_site() -> None:
    anatomy = read_anatomy(encoder(), torch.randn(2, 5, 16))
    assert anatomy.unread == ()
    (stack,) = anatomy.stacks
    assert stack.name == "encoder"
    assert stack.final_norm is None
    assert [b.path for b in stack.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert {b.placement for b in anatomy.branches} == {"post"}
    assert [b.kind for b in stack.blocks[0].branches] == ["attention", "feed-forward"]
    attention, feed_forward = stack.blocks[0].branches
    assert attention.path == "layers.0.self_attn"
    assert [p.roles for p in attention.projections] == [("q", "k", "v"), ("o",)]
    assert [p.roles for p in feed_forward.projections] == [("up",), ("down",)]
    assert [n.path for b in stack.blocks[2].branches for n in b.norms] == ["layers.2.norm1", "layers.2.norm2"]
    assert anatomy.activation_bytes > 0


def test_pre_ln_last_norm_is_final_and_missing_when_it_is_missing() -> None:
    x = torch.randn(2, 5, 16)
    with_norm, without = (read_anatomy(encoder(norm_first=True, final=final), x) for final in (True, False))
    assert {b.placement for b in (*with_norm.branches, *without.branches)} == {"pre"}
    assert with_norm.stacks[0].final_norm is not None
    assert with_norm.stacks[0].final_norm.path == "norm"
    assert with_norm.final_norm
    assert not without.final_norm


def test_post_ln_with_a_further_norm_has_a_final_norm() -> None:
    anatomy = read_anatomy(encoder(final=True), torch.randn(2, 5, 16))
    assert {b.placement for b in anatomy.branches} == {"post"}
    assert anatomy.stacks[0].final_norm is not None
    assert anatomy.stacks[0].final_norm.path == "norm"


@pytest.mark.parametrize("norm_first", [False, True])
def test_capture_hands_back_what_hooks_see_at_every_site(norm_first: bool) -> None:
    model, x = encoder(norm_first, final=norm_first), torch.randn(2, 5, 16)
    anatomy = read_anatomy(model, x)
    seen = seen_by_hooks(model, x)
    sites = all_sites(anatomy)
    with measuring(model):
        out, got = capture(model, lambda: model(x), sites)
    assert set(got) == set(sites)
    torch.testing.assert_close(out, seen[""], rtol=0, atol=0)
    torch.testing.assert_close(got[anatomy.blocks[0].entry], x, rtol=0, atol=0)
    for block in anatomy.blocks:
        torch.testing.assert_close(got[block.exit], seen[block.path], rtol=0, atol=0)
        attention, feed_forward = block.branches
        torch.testing.assert_close(got[attention.output], seen[f"{block.path}.self_attn"][0], rtol=0, atol=0)
        torch.testing.assert_close(got[feed_forward.output], seen[f"{block.path}.linear2"], rtol=0, atol=0)
        torch.testing.assert_close(
            got[attention.sum], got[attention.entry] + got[attention.output], rtol=0, atol=1e-6
        )
        for norm in (*attention.norms, *feed_forward.norms):
            torch.testing.assert_close(got[norm.output], seen[norm.path], rtol=0, atol=0)
        (heads,) = attention.attention
        torch.testing.assert_close(got[heads.probabilities], got[heads.logits].softmax(-1))
        torch.testing.assert_close(got[heads.logits].flatten(0, 1), got[heads.query] @ got[heads.key])
        assert got[heads.probabilities].shape == (2, 2, 5, 5)


def test_captured_tensors_are_those_of_the_graph() -> None:
    model, x = encoder(norm_first=True, final=True), torch.randn(2, 5, 16)
    anatomy = read_anatomy(model, x)
    sites = [s for s in all_sites(anatomy) if s != anatomy.blocks[0].entry]
    with measuring(model):
        out, got = capture(model, lambda: model(x), sites)
    gradients = torch.autograd.grad(out.square().sum(), list(got.values()), allow_unused=True)
    assert all(g is not None for g in gradients)
    assert got[anatomy.blocks[-1].exit].grad_fn is not None


def test_measuring_puts_everything_back_also_on_an_exception() -> None:
    model = encoder()
    model.train()
    model.layers[1].eval()
    modes = [m.training for m in model.modules()]
    with measuring(model):
        assert not any(m.training for m in model.modules())
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(ZeroDivisionError), measuring(model):
        _ = 1 / 0
    assert [m.training for m in model.modules()] == modes
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_reading_leaves_no_hook_and_no_mode() -> None:
    model = encoder()
    before = {k: len(v) for k, v in vars(torch.nn.modules.module).items() if k.startswith("_global") and v}
    state = torch.random.get_rng_state()
    read_anatomy(model, torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)))
    after = {k: len(v) for k, v in vars(torch.nn.modules.module).items() if k.startswith("_global") and v}
    assert before == after
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(m.training for m in model.modules())


def test_a_nan_does_not_stop_the_reading() -> None:
    model = encoder(norm_first=True, final=True)
    with torch.no_grad():
        model.layers[1].linear1.weight.fill_(float("nan"))
    anatomy = read_anatomy(model, torch.randn(2, 5, 16))
    assert {b.placement for b in anatomy.branches} == {"pre"}


def test_without_residual_sums_it_says_so() -> None:
    anatomy = read_anatomy(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 4))
    assert anatomy.stacks == ()
    assert not anatomy.final_norm
    assert any("no residual sum" in line for line in anatomy.unread)


def test_a_stream_that_autograd_saves_is_captured_with_its_graph() -> None:
    """ReLU saves its output through a `detach`: the site must name the tensor that the next block reads."""

    class Rectified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.down(self.up(x)))

    model, x = nn.Sequential(*(Rectified() for _ in range(3))), torch.randn(2, 4, 8)
    anatomy = read_anatomy(model, x)
    assert [b.path for b in anatomy.blocks] == ["0", "1", "2"]
    with measuring(model):
        out, got = capture(model, lambda: model(x), [b.entry for b in anatomy.blocks[1:]])
    gradients = torch.autograd.grad(out.sum(), list(got.values()))
    assert all(bool(g.any()) for g in gradients)


@pytest.mark.parametrize("shape", [(1, 5, 16), (5, 16)])
def test_scores_with_a_learnt_bias_of_the_first_layer_are_no_stream(shape: tuple[int, ...]) -> None:
    """A bias that the first attention reads is an ancestor of every later score (T5, ALiBi).

    Without a batch axis, the attention's value is the stream itself and no view of it.
    """

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(5, 5))
            self.q, self.k, self.o = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for q, k, o in zip(self.q, self.k, self.o, strict=True):
                scores = q(x) @ k(x).mT + self.bias
                x = x + o(scores.softmax(-1) @ x)
            return x

    anatomy = read_anatomy(Biased(), torch.randn(shape))
    assert anatomy.unread == ()
    assert [b.kind for b in anatomy.branches] == ["attention"] * 3


class InPlace(nn.Module):
    """x += f(x), twice per block, without norms: the stream is one tensor object throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for layer in self.layers:
            x += layer(x)
        return x


def test_in_place_sums_are_rebound_and_captured_before_they_are_overwritten() -> None:
    model, x = InPlace(), torch.randn(2, 4, 8)
    anatomy = read_anatomy(model, x)
    assert len(anatomy.branches) == 3
    with measuring(model):
        _, got = capture(model, lambda: model(x), [b.exit for b in anatomy.blocks])
    h = x
    for block, layer in zip(anatomy.blocks, model.layers, strict=True):
        h = h + layer(h)
        torch.testing.assert_close(got[block.exit], h)


def test_views_of_a_written_storage_see_the_write() -> None:
    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(2, 4)
            out[0] = self.w(x[0])
            return F.relu(out)

    graph = record_forward(Slots(), torch.randn(2, 4))
    (relu,) = [op for op in graph.ops if op.base == "relu"]
    assert relu.inputs[0].live
    assert relu.inputs[0].learnt


def test_an_op_without_a_result_changes_what_its_schema_says() -> None:
    class Foreach(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(2, 4)
            torch._foreach_add_([out], [self.w(x)])
            return F.relu(out)

    model, x = Foreach(), torch.randn(2, 4)
    graph = record_forward(model, x)
    (relu,) = [op for op in graph.ops if op.base == "relu"]
    assert relu.inputs[0].learnt
    site = relu.inputs[0].site
    with measuring(model):
        _, found = capture(model, lambda: model(x), [site])
    torch.testing.assert_close(found[site], model.w(x))
    (add,) = [op for op in graph.ops if op.base == "_foreach_add"]
    assert len(add.outputs) == 1, "what it only reads is no output of it"
