"""Tests of probes with the reader: GPT-2 with its fused Conv1D, PyTorch's encoder with its (T, B, d)."""

import math

import pytest
import torch
from hand_read import subject_of
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.probes import Measurements
from normscope.probes.attention import measure_attention
from normscope.probes.gradient import measure_gradient
from normscope.probes.precision import measure_precision
from normscope.probes.signal import measure_signal
from normscope.subjects import Subject

WIDTH, LENGTH = 16, 7


def all_rows(subject: Subject) -> Measurements:
    anatomy = read_anatomy(subject)
    rows = Measurements()
    for probe in (measure_signal, measure_gradient, measure_attention, measure_precision):
        rows.extend(probe(subject, anatomy))
    return rows


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().double().pow(2).mean().sqrt())


def diversity(stream: Tensor) -> float:
    """Token diversity of a (B, T, d) stream."""
    x = stream.detach().double()
    return float(((x - x.mean(1, keepdim=True)).pow(2).sum((1, 2)) / x.pow(2).sum((1, 2))).mean())


def cubes(output: Tensor, batch: object) -> Tensor:
    return output[..., :5].pow(3).mean()


def test_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=32, n_positions=LENGTH, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(32, (3, LENGTH))
    subject = subject_of(model, {"input_ids": ids, "labels": ids}, lambda output, batch: output.loss)
    rows = all_rows(subject)
    assert all(row.measured for row in rows), [row for row in rows if not row.measured]

    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, i, output, name=name: seen.update(
                {name: output[0] if isinstance(output, tuple) else output}
            )
        )
    loss = subject.loss(model=model.eval())
    weights = dict(model.named_parameters())
    exits = [seen[f"transformer.h.{i}"] for i in range(2)]
    found = torch.autograd.grad(loss, [*weights.values(), *exits])
    of = dict(zip([*weights, "exit.0", "exit.1"], found, strict=True))
    for i in range(2):
        block, attention, mlp = (f"transformer.h.{i}{part}" for part in ("", ".attn", ".mlp"))
        assert rows.of("stream/diversity")[block] == pytest.approx(diversity(seen[block]), rel=1e-5)
        assert rows.of("branch/rms")[attention] == pytest.approx(rms(seen[attention]), rel=1e-5)
        assert rows.of("branch/rms")[mlp] == pytest.approx(rms(seen[mlp]), rel=1e-5)
        assert rows.of("gradient/stream")[block] == pytest.approx(float(of[f"exit.{i}"].norm()), rel=1e-4)
        q, k, v = of[f"{attention}.c_attn.weight"].chunk(3, dim=1)
        kinds = {"q": q, "k": k, "v": v, "o": of[f"{attention}.c_proj.weight"]}
        for role, gradient in kinds.items():
            assert rows.of(f"gradient/{role}")[attention] == pytest.approx(rms(gradient), rel=1e-4), role
        assert rows.of("gradient/up")[mlp] == pytest.approx(rms(of[f"{mlp}.c_fc.weight"]), rel=1e-4)
    assert rows.of("gradient/total")[""] == pytest.approx(
        math.sqrt(sum(rms(of[name]) ** 2 * of[name].numel() for name in weights)), rel=1e-4
    )
    assert len(rows.of("gradient/erased")) == 5
    assert rows.of("precision/bfloat16-cosine")[""] > 0.99


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder(norm_first: bool, batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, norm_first=norm_first, batch_first=batch_first)
    norm = nn.LayerNorm(WIDTH) if norm_first else None
    model = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    x_BTD = torch.randn(3, LENGTH, WIDTH)
    batch = x_BTD if batch_first else x_BTD.transpose(0, 1).contiguous()
    subject = subject_of(model, batch, cubes)
    rows = all_rows(subject)

    seen: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, i, output, name=name: seen.update({name: output}))
    torch.backends.mha.set_fastpath_enabled(False)
    cubes(model.eval()(batch), batch).backward()
    torch.backends.mha.set_fastpath_enabled(True)
    for i in range(2):
        row = rows.find("stream/diversity", f"layers.{i}")
        assert row is not None
        stream = seen[f"layers.{i}"]
        assert row.value == pytest.approx(
            diversity(stream if batch_first else stream.transpose(0, 1)), rel=1e-5
        )
        assert row.how == ("exact" if batch_first else "exact; stream read as (T, B, d)")
        q, k, v = model.layers[i].self_attn.in_proj_weight.grad.chunk(3)
        for role, gradient in {"q": q, "k": k, "v": v}.items():
            (value,) = (
                v for site, v in rows.of(f"gradient/{role}").items() if site.startswith(f"layers.{i}.")
            )
            assert value == pytest.approx(rms(gradient), rel=1e-4), role
    assert all(row.measured for row in rows), [row for row in rows if not row.measured]
