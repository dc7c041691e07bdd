"""The option `fused` of the models: the same outputs and gradients, and where it applies."""

import copy

import pytest
import torch

from normscope.anatomy import read_anatomy
from normscope.nn import SCHEMES, build
from normscope.nn.fused import FusedRMSNorm, summed_for
from normscope.nn.joins import WeightedSum
from normscope.nn.norms import RMSNorm

IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
PLAIN = {"pre": 6, "post": 6, "deepnorm": 6, "peri": 6, "res-post": 1, "rezero": 0}
"""Scheme → fused sums of three blocks; the branches of res-post read the bare stream."""


def made(scheme: str, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return build("decoder", scheme=scheme, depth=3, width=32, heads=2, **options)


def num_fused(model: torch.nn.Module) -> int:
    return sum(bool(each.read_by) for each in model.modules() if isinstance(each, WeightedSum))


def gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    output = model.train()(IDS).logits
    output.square().mean().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("norm", "checkpoint"), [("layernorm", False), ("rmsnorm", True)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fused_model_has_the_same_outputs_and_gradients(scheme: str, norm: str, checkpoint: bool) -> None:
    options = {"norm": norm, "checkpoint": checkpoint, "dropout": 0.1}
    (output, grads), (fused, fused_grads) = (
        gradients(made(scheme, fused=fused, **options)) for fused in (False, True)
    )
    torch.testing.assert_close(fused, output, rtol=1e-5, atol=1e-6)
    assert fused_grads.keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(fused_grads[name], grad, rtol=1e-4, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize(("scheme", "number"), PLAIN.items())
def test_plain_and_scaled_sums_before_a_norm_are_fused(scheme: str, number: int) -> None:
    assert num_fused(made(scheme, fused=True)) == number
    assert num_fused(made(scheme)) == 0
    assert num_fused(made(scheme, norm="scalenorm", fused=True)) == 0


def test_a_checkpointed_block_fuses_within_itself_alone() -> None:
    assert num_fused(made("pre", fused=True, checkpoint=True)) == 3
    assert num_fused(made("post", fused=True, checkpoint=True)) == 6


def test_a_copy_has_its_own_norms() -> None:
    model = made("pre", fused=True)
    other = copy.deepcopy(model)
    expected = other(IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.testing.assert_close(other(IDS).logits, expected)


def test_the_reading_of_a_fused_model_is_that_of_the_plain_one() -> None:
    for scheme in ("pre", "post", "deepnorm"):
        plain, fused = (read_anatomy(made(scheme, fused=each), IDS) for each in (False, True))
        assert [b.to_dict() for b in fused.branches] == [b.to_dict() for b in plain.branches]
        assert not fused.unread
        assert fused.final_norm == plain.final_norm


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_autocast_keeps_the_dtypes_of_the_norms(norm: str) -> None:
    def dtypes(fused: bool) -> list[torch.dtype]:
        model, found = made("pre", norm=norm, fused=fused), []
        for name, module in model.named_modules():
            if name.endswith("norm") or "norms." in name:
                module.register_forward_hook(lambda module, args, output: found.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS)
        return found

    assert dtypes(True) == dtypes(False) != []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_default_epsilon_is_that_of_the_norm(dtype: torch.dtype) -> None:
    norm, plain = FusedRMSNorm(8, eps=None).to(dtype), RMSNorm(8, eps=None).to(dtype)
    x, f = (1e-4 * torch.randn(2, 8, dtype=dtype) for _ in range(2))
    stream = summed_for(norm, x, f, 1.0)
    torch.testing.assert_close(norm(stream), plain(stream), rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-2)
