"""`swap`: the weights that are kept, the warning, and the state that is not changed."""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from normscope.errors import UsageError
from normscope.nn import (
    MODELS,
    SCHEMES,
    SwapWarning,
    build,
    load_model,
    profile_admin,
    save_model,
    set_output_bias,
    swap,
)
from normscope.nn.drawn import is_trained
from normscope.nn.linear import SigmaLinear

SMALL: dict[str, Any] = {"depth": 2, "width": 16, "heads": 2}
STREAM_NORM = "blocks.0.attention_residual.norms.stream.weight"
ENTRY_NORM = "blocks.0.attention_residual.norms.branch_in.weight"


def _inputs(kind: str) -> tuple[Tensor, ...]:
    if kind == "vision":
        return torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    ids = torch.randint(9, (2, 8))
    return ids, ids


def _trained(kind: str = "decoder", **options: Any) -> Any:
    """One small step of SGD is enough for weights to count as trained."""
    model = build(kind, **{**SMALL, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    output = model(*_inputs(kind))
    assert output.loss is not None
    output.loss.backward()
    optimizer.step()
    return model


@contextmanager
def _leaves_alone(model: nn.Module) -> Iterator[None]:
    weights, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    yield
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[path], now) for path, now in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]


@pytest.mark.parametrize("kind", MODELS)
def test_new_weights_move_without_a_warning(kind: str) -> None:
    model = build(kind, scheme="post", dropout=0.1, **SMALL)
    with _leaves_alone(model):
        other = swap(model, "pre")
    assert type(other) is type(model)
    assert other.config.scheme == "pre"
    assert other.config.dropout == 0.1
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() - theirs.keys()
    assert theirs.keys() - ours.keys()
    for path in ours.keys() & theirs.keys():
        assert torch.equal(ours[path], theirs[path])
        assert ours[path].data_ptr() != theirs[path].data_ptr()
    assert not is_trained(other)


@pytest.mark.parametrize("kind", MODELS)
def test_trained_weights_warn_with_what_changed(kind: str) -> None:
    model = _trained(kind, scheme="post")
    given, *_ = _inputs(kind)
    with _leaves_alone(model), pytest.warns(SwapWarning) as caught:
        other = swap(model, "pre", given)
    warning = caught[0].message
    assert isinstance(warning, SwapWarning)
    two = (given,) if kind != "encoder-decoder" else (given, None, given)
    before, after = (m.eval()(*two).logits.double().flatten(0, -2) for m in (model, other))
    assert warning.relative_change == pytest.approx(
        ((after - before).norm() / before.norm()).item(), rel=1e-6
    )
    kl = F.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean")
    assert warning.kl == pytest.approx(kl.item(), rel=1e-6)
    assert any(path.endswith("blocks.*.attention_residual.norms.stream.weight") for path in warning.dropped)
    assert any(path.endswith("blocks.*.attention_residual.norms.branch_in.weight") for path in warning.new)
    assert any(path.endswith("final_norm.weight") for path in warning.new)
    assert "post → pre" in str(warning)
    assert f"{warning.relative_change:.0%}" in str(warning)
    assert f"{warning.kl:.2g} nats" in str(warning)
    assert "norms.stream.weight" in str(warning).split("New:")[0]
    assert caught[0].filename == __file__
    assert is_trained(other)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_from_pre_and_back(name: str) -> None:
    model = build("decoder", scheme="pre", **SMALL).eval()
    with _leaves_alone(model):
        other = swap(model, name)
    assert not other.training
    ids = torch.randint(9, (1, 5))
    assert other(ids).logits.isfinite().all()
    back = swap(other, "pre")
    assert dict(back.named_parameters()).keys() == dict(model.named_parameters()).keys()
    if name not in ("ngpt",):  # whose matrices went onto the sphere
        assert torch.equal(back.blocks[0].attention.q.weight, model.blocks[0].attention.q.weight)


def test_a_tensor_of_the_same_path_and_another_shape_starts_afresh() -> None:
    """ReZero's single number does not become LayerScale's vector."""
    other = swap(build("decoder", scheme="rezero", **SMALL), "layerscale")
    assert torch.equal(other.blocks[0].attention_residual.join.scale, torch.full((16,), 0.1))


def test_the_random_ids_are_always_the_same() -> None:
    model, seen = _trained(scheme="post"), []
    for _ in range(2):
        torch.rand(3)
        with pytest.warns(SwapWarning) as caught:
            swap(model, "peri")
        seen.append(caught[0].message.kl)  # type: ignore[union-attr]
    assert seen[0] == seen[1]


def test_the_same_dataflow_is_no_change() -> None:
    model = _trained(scheme="pre")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = swap(model, "gpt2")  # another initialisation, the same model
    ids = torch.randint(9, (1, 5))
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_sigma_of_kept_weights() -> None:
    """σReparam's singular vectors belong to the kept weights, not to the dropped initial ones."""
    other = swap(build("decoder", scheme="pre", **SMALL), "sigma-reparam")
    linears = [module for module in other.modules() if isinstance(module, SigmaLinear)]
    assert linears
    for linear in linears:
        sigma = linear.u @ linear.weight @ linear.v
        torch.testing.assert_close(sigma, torch.linalg.matrix_norm(linear.weight, 2), rtol=1e-4, atol=0)


def test_swapped_to_ngpt_the_weights_are_on_the_sphere() -> None:
    other = swap(build("decoder", scheme="pre", **SMALL), "ngpt")
    for weight in (other.embedding.tokens.weight, other.blocks[0].attention.q.weight, other.head.weight):
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(len(weight)))


def test_frozen_and_tied_weights_stay_so() -> None:
    model = build("decoder", scheme="post", tie=True, **SMALL)
    model.embedding.tokens.weight.requires_grad_(False)
    other = swap(model, "pre")
    assert other.head.weight is other.embedding.tokens.weight
    assert not other.head.weight.requires_grad
    assert other.final_norm.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_precision_stays(dtype: torch.dtype) -> None:
    other = swap(build("decoder", scheme="post", **SMALL).to(dtype), "pre")
    assert {p.dtype for p in other.parameters()} == {dtype}
    assert not is_trained(other)


def test_fake_and_meta_models() -> None:
    with FakeTensorMode():
        model = build("decoder", scheme="post", **SMALL)
        assert not is_trained(model)
    other = swap(model, "pre")
    assert all(isinstance(p, FakeTensor) for p in other.parameters())
    with torch.device("meta"):
        model = build("decoder", scheme="post", **SMALL)
    assert all(p.is_meta for p in swap(model, "pre").parameters())


def test_bad_requests() -> None:
    with pytest.raises(UsageError, match=r'"per".*"peri"|"per".*"pre"'):
        swap(build("decoder", **SMALL), "per")
    with pytest.raises(UsageError, match="class Linear"):
        swap(nn.Linear(2, 2), "pre")  # type: ignore[arg-type]


TRIPS = {
    "deepcopy": copy.deepcopy,
    "bfloat16 and back": lambda model: model.bfloat16().float(),
    "float64": lambda model: model.double(),
    "float16": lambda model: model.half(),
    "the head alone in bfloat16": lambda model: (model.head.bfloat16(), model)[1],
    "its own state dict": lambda model: (model.load_state_dict(model.state_dict()), model)[1],
}


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("kind", MODELS)
def test_trips_do_not_train(trip: str, kind: str) -> None:
    assert not is_trained(TRIPS[trip](build(kind, **SMALL)))
    assert is_trained(TRIPS[trip](_larger_step(kind)))


def _larger_step(kind: str) -> nn.Module:
    """A step that is large enough for half precision."""
    model = build(kind, **SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def test_disks_do_not_train(tmp_path: Any) -> None:
    for index, model in enumerate((build("decoder", **SMALL), _trained())):
        save_model(model, tmp_path / str(index))
        assert is_trained(load_model(tmp_path / str(index))) == bool(index)


def test_vectors_that_data_set_are_not_training() -> None:
    model = build("decoder", scheme="admin", output_bias=True, **SMALL)
    profile_admin(model, torch.randint(9, (2, 8)))
    set_output_bias(model, [1.0] * 255 + [9.0])
    assert not is_trained(model)


def test_the_weights_of_another_model_count_as_trained() -> None:
    model, other = build("decoder", **SMALL), build("decoder", **SMALL)
    model.load_state_dict(other.state_dict())
    assert is_trained(model)


@pytest.mark.slow
def test_the_page_on_swapping_says_what_its_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "swap.md").read_text(encoding="utf-8")
    script, shown = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", page, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    exec(compile(script, "swap.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(shown.splitlines())
    for ours, theirs in zip(printed, shown.splitlines(), strict=True):
        figures = [[float(x) for x in re.findall(r"\d+\.?\d*", line)] for line in (ours, theirs)]
        assert re.sub(r"[\d.]+", "", ours) == re.sub(r"[\d.]+", "", theirs)
        assert figures[0] == pytest.approx(figures[1], rel=0.1)
