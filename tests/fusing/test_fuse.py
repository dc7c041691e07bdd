"""`fuse` over models of several makers: the same losses and weights as without, and the way back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope
from normscope.errors import UsageError
from normscope.fusing import checking, fuse
from normscope.kernels.ahead import ReadsAhead
from normscope.nn import build
from normscope.planning import recompute

pytestmark = pytest.mark.usefixtures("no_function_modes")
WIDTH, VOCABULARY, STEPS = 32, 64, 4
IDS = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """PyTorch's own encoder between an embedding and a head."""

    def __init__(self, norm_first: bool, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.1, batch_first=True, norm_first=norm_first)
        final = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, depth, final, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)))


class PlusOne(nn.Module):
    """RMSNorm with the gain 1 + weight, written out as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class OwnBlock(nn.Module):
    """A Pre-LN block.

    `alpha` scales the skip in the add and `beta` the branch; `inline` writes a norm into the block; with
    `parallel` two norms read one sum.
    """

    def __init__(
        self, alpha: float = 1.0, beta: float = 1.0, inline: bool = False, parallel: bool = False
    ) -> None:
        super().__init__()
        self.first, self.second = PlusOne(), PlusOne()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.alpha, self.beta, self.inline, self.parallel = alpha, beta, inline, parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.parallel:
            return x + torch.tanh(self.up(self.first(x))) * self.down(self.second(x))
        branch = torch.tanh(self.up(self.first(x)))
        x = (
            torch.add(x, branch, alpha=self.beta)
            if self.beta != 1
            else torch.add(branch, x, alpha=self.alpha)
        )
        if self.inline:
            normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.second.weight)
        else:
            normed = self.second(x)
        return x + torch.tanh(self.down(normed))


class Own(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.Sequential(*(OwnBlock(**options) for _ in range(3)))
        self.final, self.ends_early = PlusOne(), False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.embedding(ids))
        return x if self.ends_early else self.head(self.final(x))


def hugging_face(kind: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, **options
    )
    make = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    return make.from_config(config)


SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2": (lambda: hugging_face("gpt2", n_embd=WIDTH, n_layer=2, n_head=2), 4),
    "llama": (lambda: hugging_face("llama", **SIZES, num_key_value_heads=1), 4),
    "bert": (lambda: hugging_face("bert", **SIZES), 4),
    "torch, Pre-LN": (lambda: Encoder(True), 4),
    "torch, Post-LN": (lambda: Encoder(False), 4),
    "own, 1 + weight": (Own, 6),
    "own, scaled skip": (lambda: Own(alpha=1.5), 6),
    "own, scaled branch": (lambda: Own(beta=0.5), 6),
    "nn, DeepNorm": (lambda: build("decoder", scheme="pre", depth=2, width=WIDTH, vocab=VOCABULARY), 4),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


def trained(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Losses of a few steps with dropout on."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        output = model(IDS)
        logits = getattr(output, "logits", output)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), IDS.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_trains_as_before_and_can_be_taken_back(name: str) -> None:
    plain, model = made(name), made(name)
    kinds = [type(module) for module in model.modules()]
    fused = fuse(model, IDS)
    assert len(fused.pairs) == MODELS[name][1]
    assert not fused.left
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert trained(model) == pytest.approx(trained(plain), rel=1e-6)
    assert fused.undo() is model
    assert [type(module) for module in model.modules()] == kinds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert trained(model) == pytest.approx(trained(plain), rel=1e-5), "with the weights that it has by now"


@pytest.mark.parametrize("name", MODELS)
def test_each_pair_is_computed_by_one_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(name)
    ran: list[str] = []
    original = checking.residual_norm

    def counted(*arguments: Any, **options: Any) -> Any:
        ran.append(options["norm"])
        return original(*arguments, **options)

    with fuse(model, IDS) as fused, torch.no_grad():
        monkeypatch.setattr(checking, "residual_norm", counted)
        model.eval()(IDS)
        assert sorted(ran) == sorted(pair.kind for pair in fused.pairs)
        assert not any("_ahead" in vars(module) for module in model.modules()), "nothing is kept"
    model(IDS)
    assert len(ran) == len(fused.pairs), "taken back"


def test_a_pair_that_differs_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    original = checking.residual_norm

    def wrong(*arguments: Any, **options: Any) -> Any:
        if options["norm"] == "rms":
            options["eps"] += 0.01
        return original(*arguments, **options)

    monkeypatch.setattr(checking, "residual_norm", wrong)
    with pytest.raises(UsageError, match="the normed stream would differ by"):
        fuse(made("llama"), IDS)
    assert fuse(made("gpt2"), IDS).pairs


def test_a_difference_beyond_rounding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original, factor = checking.residual_norm, 1 + 1e-3

    def scaled(*arguments: Any, **options: Any) -> Any:
        normed, stream = original(*arguments, **options)
        return factor * normed, stream

    monkeypatch.setattr(checking, "residual_norm", scaled)
    with pytest.raises(UsageError, match=r"the normed stream would differ by 0\.001 of its largest entry"):
        fuse(made("gpt2"), IDS)
    factor = 1 + 1e-6
    assert fuse(made("gpt2"), IDS).pairs


def test_a_result_that_is_no_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = checking.residual_norm

    def wrong(*arguments: Any, **options: Any) -> Any:
        normed, stream = original(*arguments, **options)
        return normed * torch.nan, stream

    monkeypatch.setattr(checking, "residual_norm", wrong)
    with pytest.raises(UsageError, match="the normed stream would differ by nan"):
        fuse(made("gpt2"), IDS)


def test_a_result_of_another_dtype_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = checking.residual_norm

    def wrong(*arguments: Any, **options: Any) -> Any:
        normed, stream = original(*arguments, **options)
        return normed, stream.double()

    monkeypatch.setattr(checking, "residual_norm", wrong)
    with pytest.raises(
        UsageError, match=r"the stream would have dtype torch.float64 instead of torch.float32"
    ):
        fuse(made("gpt2"), IDS)


@pytest.mark.parametrize("which", ["skip", "weight"])
def test_a_wrong_gradient_is_found(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checking.residual_norm

    def wrong(x: Tensor, branch: Tensor, *, weight: Tensor, **options: Any) -> Any:
        x, weight = (x.detach(), weight) if which == "skip" else (x, 2 * weight - weight.detach())
        return original(x, branch, weight=weight, **options)

    monkeypatch.setattr(checking, "residual_norm", wrong)
    with pytest.raises((UsageError, RuntimeError)):
        fuse(made("gpt2"), IDS)


def test_norms_that_are_no_module_of_their_own_are_left_with_the_reason() -> None:
    torch.manual_seed(0)
    fused = fuse(Own(inline=True), IDS)
    assert len(fused.pairs) == 3
    assert {each.norm for each in fused.left} == {f"blocks.{i}" for i in range(3)}
    assert "written out in a larger module" in repr(fused)


def test_one_of_two_norms_that_read_a_sum_is_fused() -> None:
    torch.manual_seed(0)
    model = Own(parallel=True)
    expected = model(IDS)
    fused = fuse(model, IDS)
    assert [pair.norm for pair in fused.pairs] == ["blocks.1.first", "blocks.2.first", "final"]
    assert [each.norm for each in fused.left] == ["blocks.1.second", "blocks.2.second"]
    torch.testing.assert_close(model(IDS), expected)


def test_a_result_that_no_norm_asks_for_is_dropped() -> None:
    model = made("own, 1 + weight")
    fuse(model, IDS)
    model.ends_early = True
    model(IDS)
    assert not any("_ahead" in vars(module) for module in model.modules())


def test_a_norm_that_is_asked_for_another_tensor_computes_it() -> None:
    class Norm(ReadsAhead, nn.LayerNorm):
        pass

    x, other = torch.randn(2, 3), torch.randn(2, 3)
    norm = Norm(3)
    norm.expect(x, torch.zeros(2, 3))
    torch.testing.assert_close(norm(other), nn.functional.layer_norm(other, (3,)))
    norm.expect(x, torch.zeros(2, 3))
    assert not norm(x).any()
    norm.expect(x, torch.zeros(2, 3))
    norm.forget()
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (3,)))


def test_copies_are_fused_and_have_their_own_weights() -> None:
    model = made("gpt2")
    expected = trained(made("gpt2"))
    fuse(model, IDS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert trained(other) == pytest.approx(expected, rel=1e-6)


def test_an_error_in_the_forward_leaves_no_mode_behind() -> None:
    model = made("torch, Pre-LN")
    fuse(model, IDS)
    with pytest.raises(IndexError):
        model(IDS + VOCABULARY)
    assert torch.overrides._len_torch_function_stack() == 0
    assert trained(model) == pytest.approx(trained(made("torch, Pre-LN")), rel=1e-6)


def test_a_forward_after_an_interrupted_one_is_fused_and_leaves_its_mode() -> None:
    model = made("gpt2").eval()
    expected = model(IDS).logits
    fuse(model, IDS)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    handle.remove()
    torch.testing.assert_close(model(IDS).logits, expected)
    assert torch.overrides._len_torch_function_stack() == 0
    assert not any("_ahead" in vars(module) for module in model.modules())


def test_bfloat16_under_autocast_differs_by_rounding_alone() -> None:
    plain, model = made("llama").eval(), made("llama").eval()
    fuse(model, IDS)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = (each(IDS).logits for each in (model, plain))
    assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


def test_models_that_cannot_be_fused_are_refused() -> None:
    model = made("gpt2")
    fuse(model, IDS)
    with pytest.raises(UsageError, match="fused"):
        fuse(model, IDS)
    again = made("gpt2")
    again.transformer.gradient_checkpointing = True
    with pytest.raises(UsageError, match="gradient checkpointing"):
        fuse(again, IDS)
    third = made("gpt2")
    with recompute(third, ["transformer.h.0"]), pytest.raises(UsageError, match="checkpointing"):
        fuse(third, IDS)
    with pytest.raises(UsageError, match="fused"):
        recompute(model, ["transformer.h.0"])
    with pytest.raises(UsageError, match="residual add"):
        fuse(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4))


def test_it_is_exported() -> None:
    assert normscope.fuse is fuse
    assert not issubclass(nn.LayerNorm, ReadsAhead)


def test_norms_that_read_a_reshaped_sum_say_so() -> None:
    """OPT's sums are flattened before their norm."""
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        ffn_dim=16,
        vocab_size=32,
        word_embed_proj_dim=16,
    )
    model = transformers.OPTForCausalLM(config)
    with pytest.raises(UsageError, match="reshaped or cast sum"):
        fuse(model, torch.randint(0, 32, (2, 8)))
