"""Models that cannot be stacked are reported with the reason, and trained one after another."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from normscope.nn import build
from normscope.subjects.feed import tensors_in
from normscope.train import LoneTrials, Recipe, TrialStack, many_trials, unlike, why_not_stackable

CONFIG = Recipe(lr=1e-2)
X = torch.linspace(-1, 1, 12).view(4, 3)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Deciding(nn.Linear):
    """A model that branches on a value."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if float(y.detach().mean()) > 0 else -y


class Rounded(torch.autograd.Function):
    """A model that computes another function under vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def vmap(info: object, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        return x.round(), in_dims[0]


class Rounding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(super().forward(x))


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        (nn.Linear(3, 2), Recipe(optimizer="muon"), "muon"),
        (nn.Linear(3, 2), Recipe(precision="bfloat16"), "bfloat16"),
        (nn.Linear(3, 2).bfloat16(), CONFIG, "bfloat16"),
        (frozen(nn.Linear(3, 2)), CONFIG, "nothing to train"),
        (Deciding(3, 2), CONFIG, "vmap"),
        (Rounding(3, 2), CONFIG, "differs under torch.vmap"),
    ],
)
def test_reasons(model: nn.Module, config: Recipe, words: str) -> None:
    reason = why_not_stackable(model, X.to(next(model.parameters()).dtype), squared, config)
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


def test_a_loss_that_calls_another_model_than_it_is_handed() -> None:
    other = nn.Linear(3, 2)
    reason = why_not_stackable(nn.Linear(3, 2), X, lambda model, x: squared(other, x), CONFIG)
    assert reason is not None
    assert "does not reach" in reason


def test_checkpointed_blocks_are_refused_and_trained_alone() -> None:
    models = [build("decoder", depth=1, width=16, heads=2, checkpoint=True) for _ in range(2)]
    batch = {"ids": torch.arange(8).view(2, 4), "labels": torch.arange(8).view(2, 4)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    assert why_not_stackable(models[0], batch, loss, CONFIG) is not None
    trials = many_trials(models, [itertools.repeat(batch)] * 2, loss, [CONFIG] * 2)
    assert isinstance(trials, LoneTrials)
    assert trials.advance()[0] > 0


def test_asking_leaves_model_batch_and_generators_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert why_not_stackable(model, X, squared, CONFIG) is None
    torch.testing.assert_close(dict(model.state_dict()), kept, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def scaled(scale: object) -> nn.Module:
    model = nn.Linear(3, 2)
    model.scale = scale  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (nn.Linear(3, 2), nn.Linear(3, 2, bias=False), "bias"),
        (nn.Linear(3, 2), nn.Linear(3, 1), "out_features"),
        (nn.Linear(3, 2), nn.Linear(3, 2).double(), "weight"),
        (nn.Linear(3, 2), frozen(nn.Linear(3, 2)), "weight"),
        (nn.Linear(3, 2), Deciding(3, 2), "type"),
        (nn.Linear(3, 2), nn.Linear(3, 2).eval(), "training"),
        (scaled(1.0), scaled(2.0), "scale"),
        (scaled([1, (2, "a")]), scaled([1, (2, "b")]), "scale"),
        (scaled(X), scaled(X + 1), "scale"),
        (scaled(None), scaled(X), "scale"),
        (
            build("decoder", depth=1, width=16),
            build("decoder", depth=1, width=16, scheme="ngpt"),
            "not in all",
        ),
        (build("decoder", depth=1, width=16), build("decoder", depth=1, width=16, eps=1e-3), "config"),
    ],
)
def test_models_that_differ_in_more_than_values(one: nn.Module, other: nn.Module, words: str) -> None:
    reason = unlike([one, other], [CONFIG, CONFIG])
    assert reason is not None
    assert words in reason
    assert unlike([one, copy.deepcopy(one)], [CONFIG, CONFIG]) is None
    with pytest.raises(ValueError, match="cannot be stacked"):
        TrialStack([one, other], [iter(()), iter(())], squared, [CONFIG, CONFIG])


@pytest.mark.parametrize(
    "other",
    [{"optimizer": "sgd"}, {"accumulation": 2}, {"precision": "float16"}, {"beta1": 0.5}, {"beta2": 0.5}],
    ids=str,
)
def test_configs_that_differ_in_what_a_stack_shares(other: dict[str, object]) -> None:
    configs = [CONFIG, dataclasses.replace(CONFIG, **other)]  # type: ignore[arg-type]
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    reason = unlike(models, configs)
    assert reason is not None
    assert next(iter(other)) in reason


def test_the_same_module_twice_is_no_stack() -> None:
    model = nn.Linear(3, 2)
    reason = unlike([model, model], [CONFIG, CONFIG])
    assert reason is not None
    assert "twice" in reason


def test_the_batch_that_was_tried_is_trained_on_too() -> None:
    def numbered() -> Iterator[Tensor]:
        return iter([X * k for k in range(1, 4)])

    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    expected = [float(squared(model, X).detach()) for model in models]
    trials = many_trials(models, [numbered(), numbered()], squared, [CONFIG, CONFIG])
    assert isinstance(trials, TrialStack)
    assert trials.advance() == pytest.approx(expected)


class Marked(nn.Linear):
    """A layer that remembers that it was called, as models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.was_called = True
        return super().forward(x)


def test_a_first_forward_that_sets_an_attribute_makes_no_difference_between_replicas() -> None:
    trials = many_trials([Marked(3, 2), Marked(3, 2)], [iter([X]), iter([X])], squared, [CONFIG, CONFIG])
    assert isinstance(trials, TrialStack)


UNLIKE_BATCHES = (
    (X, X[:2]),
    (X, X.double()),
    ((X, "a"), (X, "b")),
    ((X, X), (X,)),
    ({"x": X}, {"x": X, "y": X}),
    ({"x": X, "y": X}, {"x": X}),
    ({"x": X}, {"x": [X]}),
    ({"x": X}, {"x": None}),
)


@pytest.mark.parametrize("batches", UNLIKE_BATCHES)
def test_batches_that_differ_in_form_are_no_stack(batches: tuple[object, object]) -> None:
    """No batch is dropped or converted; trials that are trained one after another may differ."""

    def loss(model: nn.Module, batch: object) -> Tensor:
        tensors = [tensor for tensor in tensors_in(batch) if tensor.is_floating_point()]
        return torch.stack([squared(model, tensor.float()) for tensor in tensors]).sum()

    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    stack = TrialStack(models, [iter([batch]) for batch in batches], loss, [CONFIG, CONFIG])
    with pytest.raises(ValueError, match="replicas need the same"):
        stack.advance()
    if tensors_in(batches[1]):
        expected = [float(loss(model, batch).detach()) for model, batch in zip(models, batches, strict=True)]
        trials = many_trials(models, [iter([batch]) for batch in batches], loss, [CONFIG, CONFIG])
        assert isinstance(trials, LoneTrials)
        assert trials.advance() == pytest.approx(expected)
