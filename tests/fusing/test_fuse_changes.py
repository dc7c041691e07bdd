"""A fused model that is used otherwise than when it was fused computes what the plain model does."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from normscope.errors import UsageError
from normscope.fusing import checking, fuse
from normscope.fusing.adds import _RECENT, AddMode, _residual
from normscope.kernels.ahead import ReadsAhead

pytestmark = pytest.mark.usefixtures("no_function_modes")
WIDTH, DEPTH = 16, 3
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A Pre-LN block; `change` is what happens to the sum, and `read` how its norm is called."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.alpha: Any = 1
        self.change: Callable[[Tensor], Any] = id
        self.read: Callable[[nn.Module, Tensor], Tensor] = lambda norm, x: norm(x)

    def forward(self, x: Tensor, auxiliary: Tensor | None = None) -> Tensor:
        if auxiliary is not None:
            auxiliary = auxiliary + torch.ones(())
        x = torch.add(torch.tanh(self.up(self.first(x))), x, alpha=self.alpha)
        self.change(x)
        return x + torch.tanh(self.down(self.read(self.second, x)))


class Model(nn.Module):
    """Blocks; `call` calls one, and without `learns` they build no graph."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(DEPTH))
        self.final, self.head = norm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)
        self.learns, self.calls_itself = True, False

    def forward(self, x: Tensor) -> Tensor:
        if self.calls_itself:
            self.calls_itself = False
            x = x + self(x)
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            for block in self.blocks:
                x = self.call(block, x)
        return self.head(self.final(x))


class Gated(nn.LayerNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


def pair(norm: Callable[[int], nn.Module] = nn.LayerNorm, **options: Any) -> tuple[Model, Model]:
    """A plain model, and a fused copy."""
    torch.manual_seed(0)
    plain = Model(norm)
    model = copy.deepcopy(plain)
    fuse(model, X, **options)
    return plain, model


def results(model: Model) -> list[Tensor]:
    """The output, and all gradients."""
    model.zero_grad()
    x = X.to(model.head.weight.dtype).requires_grad_(model.learns)
    output = model(x)
    output.float().square().sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def require_same(plain: Model, model: Model, rtol: float = 1e-4) -> None:
    for found, right in zip(results(model), results(plain), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, rtol=rtol, atol=rtol * float(right.detach().abs().max()))
    assert torch.overrides._len_torch_function_stack() == 0


def in_blocks(name: str, value: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for block in model.blocks:
            setattr(block, name, value)

    return change


def set_eps(model: Model) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.5


def checkpointed(reentrant: bool, first: int = 0) -> Callable[[Model], None]:
    """Activation checkpointing of the blocks from the first one on."""

    def change(model: Model) -> None:
        def call(block: nn.Module, x: Tensor) -> Tensor:
            if list(model.blocks).index(block) < first:
                return block(x)
            return checkpoint(block, x, use_reentrant=reentrant)

        model.call = call

    return change


def double(parameter: Tensor) -> Tensor:
    return 2 * parameter


class Twice(nn.Module):
    forward = staticmethod(double)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "the sum is changed in place": in_blocks("change", lambda x: x[:, 2:, 3:].zero_()),
    "the sum becomes a leaf of a graph": lambda model: setattr(model, "learns", False),
    "the sum keeps its gradient": in_blocks("change", lambda x: x.retain_grad()),
    "the sum has a hook": in_blocks("change", lambda x: x.register_hook(lambda grad: 2 * grad)),
    "the norm is called by keyword": in_blocks("read", lambda norm, x: norm(input=x)),
    "the norm is called twice": in_blocks("read", lambda norm, x: norm(x) + norm(x)),
    "a scalar is added first": lambda model: setattr(
        model, "call", lambda block, x: block(x, torch.zeros(()))
    ),
    "α of another type": in_blocks("alpha", torch.tensor(2.0)),
    "ε is another": set_eps,
    "a bias is taken away": lambda model: setattr(model.final, "bias", None),
    "a weight is parametrized": lambda model: parametrize.register_parametrization(
        model.final, "weight", Twice()
    ),
    "checkpointing": checkpointed(reentrant=False),
    "checkpointing from the second block": checkpointed(reentrant=False, first=1),
    "reentrant checkpointing": checkpointed(reentrant=True),
    "the model calls itself": lambda model: setattr(model, "calls_itself", True),
    "it is a double": nn.Module.double,
    "it is a bfloat16": nn.Module.bfloat16,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CHANGES)
def test_values_and_gradients_after_a_change(name: str) -> None:
    plain, model = pair()
    for each in (plain, model):
        CHANGES[name](each)
    for _ in range(2):
        require_same(plain, model, 0.05 if name == "it is a bfloat16" else 1e-4)


def test_other_arguments_of_a_norm_are_used() -> None:
    plain, model = pair(Gated)
    for each in (plain, model):
        in_blocks("read", lambda norm, x: norm(x, torch.tensor(3.0)))(each)
    require_same(plain, model)


def test_a_sum_changed_in_place_in_inference_mode() -> None:
    plain, model = pair()
    for each in (plain, model):
        in_blocks("change", lambda x: x[..., 3:].zero_())(each)
    with torch.inference_mode():
        torch.testing.assert_close(model(X), plain(X))


def test_a_norm_with_dropout_of_its_own_is_not_fused_away() -> None:
    class Dropping(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    with pytest.raises(UsageError, match="the normed stream would differ"):
        fuse(Model(Dropping).eval(), X)


def test_a_norm_whose_forward_is_replaced_is_left() -> None:
    model = Model()
    model.final.forward = model.final.forward
    fused = fuse(model, X)
    assert [(each.norm, each.why[:23]) for each in fused.left] == [("final", "its forward is replaced")]


@pytest.mark.parametrize("post", [True, False])
def test_autocast_keeps_the_dtypes_of_the_model(post: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    kind = transformers.BertModel if post else transformers.LlamaModel
    plain = kind(kind.config_class(vocab_size=64, **sizes)).eval()
    model, ids = copy.deepcopy(plain), torch.arange(24).view(2, 12)
    fuse(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (each(ids, output_hidden_states=True).hidden_states for each in (model, plain))
    for found, right in zip(ours, theirs, strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)


def test_a_model_can_be_fused_under_autocast_and_in_inference_mode() -> None:
    plain = Model()
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        model = copy.deepcopy(plain)
        with mode:
            assert len(fuse(model, X).pairs) == 2 * DEPTH
            torch.testing.assert_close(model(X), plain(X), rtol=0.02, atol=0.02)
        require_same(plain, model)


def test_each_situation_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another dtype the norm runs beside the fused operation, without its hooks, and then no more."""
    _, model = pair()
    calls, checks = [], []
    model.final.register_forward_hook(lambda *_: calls.append(1))
    original = checking._difference

    def counted(*arguments: Any) -> Any:
        checks.append(1)
        return original(*arguments)

    monkeypatch.setattr(checking, "_difference", counted)
    for number in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model.train(number % 2 == 0)(X)
    assert len(calls) == 3
    assert len(checks) == 2 * 2 * DEPTH, "each pair in training and in evaluation"


def test_a_fused_pair_that_would_differ_in_another_situation_is_left_there() -> None:
    class Odd(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            normed = super().forward(x)
            return normed + 1 if x.dtype == torch.float64 else normed

    plain, model = pair(Odd)
    torch.testing.assert_close(model.double()(X.double()), plain.double()(X.double()))


def test_a_small_weight_of_gemma_is_not_lost_in_bfloat16() -> None:
    class PlusOne(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((width,), 0.0039))

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            return (normed * (1 + self.weight.float())).to(x.dtype)

    model = Model(PlusOne)
    for module in model.modules():
        if isinstance(module, PlusOne):
            module.bfloat16()
    assert not fuse(model, X).left


@pytest.mark.parametrize("kept", [Tensor.retain_grad, lambda x: x.register_hook(lambda grad: 10 * grad)])
def test_gradients_of_a_sum_that_is_asked_for_them(kept: Callable[[Tensor], Any]) -> None:
    """In bfloat16 the norm reads the unrounded sum, so that no gradient of its own would reach the stream."""
    plain, model = pair()
    found = []
    for each in (plain.bfloat16(), model.bfloat16()):
        sums: list[Tensor] = []
        in_blocks("change", lambda x, sums=sums: (kept(x), sums.append(x)))(each)
        each(X.bfloat16()).square().sum().backward()
        found.append(sums[0].grad if kept is Tensor.retain_grad else each.blocks[0].up.weight.grad)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.05 * float(found[0].abs().max()))


def test_threads_have_modes_of_their_own() -> None:
    plain, model = pair()
    right, found, depths = plain(X), [], []

    def run() -> None:
        found.extend(model(X) for _ in range(30))
        depths.append(torch.overrides._len_torch_function_stack())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert depths == [0] * 4
    for each in found:
        torch.testing.assert_close(each, right)


def test_weights_that_are_elsewhere_are_left_to_the_model() -> None:
    """On another device or sharded until the norm is called, as FSDP and `device_map` have them."""
    _, model = pair()
    model.final.to("meta")
    with pytest.raises(RuntimeError, match="meta"):  # PyTorch's error of the plain model
        model(X)


def test_replicas_of_data_parallel_are_hooked_as_the_model() -> None:
    plain, model = pair()

    def replica(module: nn.Module) -> nn.Module:
        made = module._replicate_for_data_parallel()
        made.__dict__.update(
            _parameters={}, _modules={name: replica(m) for name, m in module._modules.items()}
        )
        for name, parameter in module._parameters.items():
            setattr(made, name, parameter.detach().clone())
        return made

    torch.testing.assert_close(replica(model)(X), plain(X))


def test_undo_in_a_forward_and_behind_a_parametrization() -> None:
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    fused = fuse(model, X)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: fused.undo() and None)
    torch.testing.assert_close(model(X), plain(X))
    handle.remove()
    require_same(plain, model)
    assert not any(isinstance(module, ReadsAhead) for module in model.modules())
    fused = fuse(model, X)
    for each in (plain, model):
        parametrize.register_parametrization(each.final, "weight", Twice())
    fused.undo()
    require_same(plain, model)


def test_results_of_a_long_forward_are_not_kept() -> None:
    class Flat(nn.Module):
        """All layers in one forward."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * _RECENT))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.norms)
            self.most = 0

        def forward(self, x: Tensor) -> Tensor:
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + torch.tanh(layer(norm(x)))
                for mode in torch.overrides._get_current_function_mode_stack():
                    self.most = max(self.most, *(len(call.recent) for call in mode.calls))
            return x

    model = Flat()
    assert len(fuse(model, X).pairs) == 2 * _RECENT - 1
    model(X)
    assert model.most == _RECENT


def test_inputs_of_blocks_that_are_done_are_not_kept() -> None:
    _, model = pair()
    running: list[int] = []

    def call(block: nn.Module, x: Tensor) -> Tensor:
        modes = torch.overrides._get_current_function_mode_stack()
        running.extend(len(mode.calls) for mode in modes if isinstance(mode, AddMode))
        return block(x)

    model.call = call
    model(X)
    assert running == [0] * DEPTH


def test_a_model_without_numbers_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(UsageError, match="meta device"):
        fuse(model, torch.empty(2, 5, WIDTH, device="meta"))


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
def test_a_fused_model_is_not_scripted_until_it_is_undone() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    plain = model(X)
    with fuse(model, X), pytest.raises(UsageError, match=r"torch\.jit\.script.*call undo\(\)"):
        torch.jit.script(model)
    torch.testing.assert_close(torch.jit.script(model)(X), plain)


def test_adds_that_are_no_residual_adds() -> None:
    """They are left to PyTorch: another result tensor, broadcasting, integers, and factors that are none."""
    x, y, row = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3)
    adds: list[tuple[Any, ...]] = [(x, y), (y, x), (x, row), (row, x), (x, 1.0), (x, y.long()), (y.long(), x)]
    taken = [_residual((x,), args, {}) is not None for args in adds]
    assert taken == [True, True, False, False, False, False, False]
    options: list[dict[str, Any]] = [
        {"alpha": 2},
        {"alpha": 0.5},
        {"alpha": torch.inf},
        {"out": y},
        {"alpha": True},
    ]
    taken = [_residual((x,), (y, x), each) is not None for each in options]
    assert taken == [True, True, False, False, False]


def dtypes_of_final(model: Model, x: Tensor) -> torch.dtype:
    """The dtype of the final norm's output."""
    found = []
    with model.final.register_forward_hook(lambda module, args, output: found.append(output.dtype)):
        model(x)
    return found[0]


def test_a_wide_branch_widens_the_stream() -> None:
    class Widens(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    torch.manual_seed(0)
    plain = Model(Widens)
    model, x = copy.deepcopy(plain), X.bfloat16()
    fused = fuse(model, x)
    assert len(fused.pairs) == 2 * DEPTH
    torch.testing.assert_close(model(x), plain(x))


def test_a_situation_is_one_of_autocast_too() -> None:
    class Casts(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            normed = super().forward(x)
            return normed.float() if torch.is_autocast_enabled("cpu") else normed

    torch.manual_seed(0)
    model, x = Model(Casts).bfloat16(), X.bfloat16()
    fuse(model, x)
    assert dtypes_of_final(model, x) == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes_of_final(model, x) == torch.float32


def test_a_norm_that_is_cast_alone() -> None:
    """Its output follows its weight; the stream keeps its dtype."""

    class Follows(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    torch.manual_seed(0)
    plain = Model(Follows)
    model = copy.deepcopy(plain)
    fuse(model, X)
    for each in (plain, model):
        each.final.double()
        each.head.double()
    assert dtypes_of_final(model, X) == dtypes_of_final(plain, X) == torch.float64
    torch.testing.assert_close(model(X), plain(X), rtol=1e-5, atol=1e-5)


def test_a_norm_that_is_narrower_than_the_branch_is_left() -> None:
    """The branch would be rounded before the sum."""

    class Narrows(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).bfloat16()

    model = Model()
    model.final = Narrows(WIDTH)
    model.head.bfloat16()
    (left,) = fuse(model, X).left
    assert (left.norm, "narrower than the branch" in left.why) == ("final", True)


def test_a_norm_with_more_parameters_is_left() -> None:
    class More(nn.LayerNorm):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.gate = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gate

    model = Model()
    model.final = More(WIDTH)
    (left,) = fuse(model, X).left
    assert (left.norm, left.why) == ("final", "it has other parameters than a weight and a bias: gate")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_transforms_of_a_fused_model_run_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tangents and batches pass through the model's own code, and a mode that records sees it."""
    from torch.utils.flop_counter import FlopCounterMode

    plain, model = pair()
    monkeypatch.setattr(checking, "residual_norm", None)
    for found, right in zip(
        torch.func.jvp(model, (X,), (X.cos(),)), torch.func.jvp(plain, (X,), (X.cos(),)), strict=True
    ):
        torch.testing.assert_close(found, right)
    batch = torch.stack([X, 2 * X])
    torch.testing.assert_close(torch.vmap(model)(batch), torch.vmap(plain)(batch))
    with FlopCounterMode(display=False):
        torch.testing.assert_close(model(X), plain(X))
