"""Verdicts about formulas, code and starts, confirmed in plain torch and NumPy without normscope."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_decoder import B, Lane, T, blocks, stacked
from torch import Tensor

F64 = torch.float64


def start(placement: str, depth: int, seed: int, init: str = "xavier") -> list[Tensor]:
    """The stream by block of a drawn stack on N(0, 1)."""
    w = stacked(depth, init, [Lane(seed)])
    x = torch.randn(1, B * T, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return blocks(x, w, placement, depth)


def slope(y: list[float]) -> float:
    """Exponent of y against 1, 2, 3, …"""
    return float(np.polyfit(np.log(np.arange(1, len(y) + 1)), np.log(y), 1)[0])


@pytest.mark.parametrize("seed", [21, 22])
def test_b6_pre_ln_grows_and_its_branches_shrink(seed):
    streams = start("pre", 32, seed)
    squares = [float(x.square().mean()) for x in streams[1:]]
    shares = [float((b - a).norm() / b.norm()) for a, b in itertools.pairwise(streams)]
    assert slope(squares) > 0.5
    assert slope(shares) < -0.3


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_b10_one_factor_does_not_decide(placement):
    depth, x = 32, torch.randn(1, B * T, 32)
    w = stacked(depth, "xavier", [Lane(23)])
    first = {name: value for name, value in w.items() if name.startswith("0.")}
    layer = lambda t: blocks(t, first, placement, 1, 1)[-1]  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(layer, x[:, :1])
    values = torch.linalg.svdvals(jacobian.reshape(32, 32))
    assert values[0] > 1 > values[-3], "one layer has gains on both sides of 1"
    x.requires_grad_()
    end = blocks(x, w, placement, depth)[-1]
    g = torch.randn_like(end)
    gain = float(torch.autograd.grad((end * g).sum(), x)[0].norm() / g.norm())
    assert not (gain > 10 and gain < 0.1)
    assert 1e-3 < gain < 1e3, "64 such factors neither explode nor vanish"


def kept_bytes(placement: str, depth: int = 4) -> tuple[int, bool]:
    """Bytes that autograd keeps, and whether what goes into the first norm is among them."""
    w = stacked(depth, "xavier", [Lane(24)])
    x = torch.randn(1, B * T, 32)
    own = {value.untyped_storage().data_ptr() for value in (*w.values(), x)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        streams = blocks(x, w, placement, depth)
    inside = all(s.untyped_storage().data_ptr() in kept for s in streams[1:-1])
    return sum(kept.values()), inside


def test_b12_pre_ln_keeps_as_much():
    (pre, reads_stream), (post, _) = kept_bytes("pre"), kept_bytes("post")
    assert reads_stream, "the stream that a norm of Pre-LN reads stays for its backward pass"
    assert pre > 0.95 * post


@pytest.mark.parametrize("placement", ["pre", "post", "res-post", "none"])
def test_b14_the_mask_holds_wherever_the_norm_is(placement):
    w = stacked(3, "xavier", [Lane(25)])
    x = torch.randn(1, B * T, 32)
    other = x.clone()
    other[:, T - 1] += 1  # the last token of the first sequence
    with torch.no_grad():
        before, after = (blocks(each, w, placement, 3)[-1] for each in (x, other))
    assert torch.equal(before[:, : T - 1], after[:, : T - 1])
    assert not torch.equal(before[:, T - 1], after[:, T - 1])


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 1e3])
def test_c9_the_gain_is_one_over_the_root(scale, eps):
    rng = np.random.default_rng(26)
    z = scale * rng.standard_normal(16)
    step = 1e-6 * scale

    def layer_norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean()) / np.sqrt(x.var() + eps)

    columns = [(layer_norm(z + step * e) - layer_norm(z - step * e)) / (2 * step) for e in np.eye(16)]
    jacobian = np.stack(columns, 1)
    assert np.linalg.norm(jacobian, 2) == pytest.approx(1 / np.sqrt(z.var() + eps), rel=1e-5)


def test_c14_zero_last_maps():
    w = stacked(6, "xavier", [Lane(27)])
    with torch.no_grad():
        for name, value in w.items():
            if name.endswith((".o", ".down")):
                value.zero_()
        x = torch.randn(1, B * T, 32)
        assert torch.equal(blocks(x, w, "pre", 6)[-1], x)
        assert not torch.allclose(blocks(x, w, "post", 6)[-1], x, atol=1e-2)


def test_c15_gpt2s_stream_grows_all_the_same():
    width, depth, generator = 256, 12, torch.Generator().manual_seed(28)

    def draw(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return 0.02 * scale * torch.randn(1, rows, columns, generator=generator)

    w, root = {}, (2 * depth) ** -0.5
    for b in range(depth):
        w |= {f"{b}.qkv": draw(width, 3 * width), f"{b}.o": draw(width, width, root)}
        w |= {f"{b}.up": draw(width, 4 * width), f"{b}.down": draw(4 * width, width, root)}
        for place in ("a", "f"):
            w[f"{b}.{place}.gain"], w[f"{b}.{place}.shift"] = (
                torch.ones(1, 1, width),
                torch.zeros(1, 1, width),
            )
    x = draw(B * T, width) + draw(B * T, width)  # tokens and places
    streams = blocks(x, w, "pre", depth)
    assert streams[-1].var() / streams[0].var() > 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_c25_a_smaller_eps_protects_less(dtype):
    def gradient(eps: float) -> Tensor:
        x = torch.zeros(64, dtype=dtype, requires_grad=True)
        y = (x - x.mean()) / ((x - x.mean()).square().mean() + torch.tensor(eps, dtype=dtype)).sqrt()
        v = torch.randn(64, generator=torch.Generator().manual_seed(29)).to(dtype)
        return torch.autograd.grad((y * v).sum(), x)[0].float().norm()

    assert gradient(1e-6) > gradient(1e-5), "the gradient at a constant input is 1/√ε"
    assert gradient(1e-5).isfinite()


@pytest.mark.parametrize(("variance", "same"), [(1e-2, True), (1.0, True), (1e-6, False), (0.02**2, False)])
def test_c34_the_two_formulas(variance, same):
    x, eps = np.sqrt(variance) * np.random.default_rng(30).standard_normal(512), 1e-5
    centred = x - x.mean()
    outside, inside = centred / (centred.std() + eps), centred / np.sqrt(centred.var() + eps)
    assert (np.linalg.norm(outside - inside) / np.linalg.norm(inside) <= 1e-3) is np.bool_(same)


def test_c35_a_norm_keeps_the_shape():
    stats = pytest.importorskip("scipy.stats")
    x = np.random.default_rng(31).exponential(1, (20, 1024))
    y = F.layer_norm(torch.from_numpy(x), (1024,)).numpy()
    assert abs(y.mean()) < 1e-3
    assert abs(y.var() - 1) < 1e-2
    assert np.median([stats.kstest(row, "norm").statistic for row in y]) > 1.36 / math.sqrt(1024)
    assert np.allclose(stats.skew(x, axis=1), stats.skew(y, axis=1), atol=1e-3), "the shape is kept"


SMALL = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}


def heard(module: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Input and output of each later call."""
    calls: list[tuple[Tensor, Tensor]] = []

    def hear(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
        calls.append((args[0], out[0] if isinstance(out, tuple) else out))

    module.register_forward_hook(hear)
    return calls


@torch.no_grad()
def test_c37_bert_norms_its_stream_and_gpt2_does_not():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(32)
    ids = torch.randint(64, (2, 8))
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=64, **shape)).eval()
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, **SMALL)).eval()
    llama = transformers.LlamaModel(transformers.LlamaConfig(**shape, **SMALL)).eval()
    unit = {}
    for name, model, block in (
        ("bert", bert, bert.encoder.layer[0]),
        ("gpt2", gpt2, gpt2.h[0]),
        ("llama", llama, llama.layers[0]),
    ):
        calls = heard(block)
        model(ids)
        variance = calls[0][1].var(-1, correction=0)
        unit[name] = bool((variance - 1).abs().max() < 1e-2)
    assert unit == {"bert": True, "gpt2": False, "llama": False}


@torch.no_grad()
def test_c38_branches_do_not_start_at_zero():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(33)
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, **SMALL)).eval()
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=64, num_layers=2, d_model=64, d_ff=128, d_kv=16, num_heads=4)
    ).eval()
    for model, block, branch in (
        (gpt2, gpt2.h[0], gpt2.h[0].attn),
        (t5, t5.encoder.block[0], t5.encoder.block[0].layer[0].SelfAttention),
    ):
        stream, added = heard(block), heard(branch)
        model(torch.randint(64, (2, 8)))
        assert added[0][1].norm() / stream[0][0].norm() > 0.01
