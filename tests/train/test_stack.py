"""A replica of a stack equals a single trial of its config: schemes, optimisers, settings, models."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.nn import SCHEMES
from normscope.subjects import load
from normscope.train import LoneTrials, Recipe, Trials, TrialStack, many_trials
from normscope.train.stack_optim import clip_each

STEPS = 4
EPS = 1e-4  # Adam's own divides what is zero but for rounding by itself, and makes two roundings two walks
CONFIGS = (
    Recipe(lr=1e-2, eps=EPS),
    Recipe(lr=3e-3, warmup=3, weight_decay=0.1, eps=EPS),
    Recipe(lr=1e-3, clip=0.1, eps=10 * EPS, schedule="cosine", steps=4, warmup=1),
)


def trials_of(make: Callable[..., Trials], spec: str, configs: Sequence[Recipe], **options: Any) -> Trials:
    subjects = [
        load(spec, seed=seed, dtype=torch.float64, batch_size=2, seq_len=8, **options)
        for seed in range(len(configs))
    ]
    models = [subject.model for subject in subjects]
    batches = [subject.batches() for subject in subjects]
    return make(models, batches, lambda model, batch: subjects[0].loss(batch, model), configs)


def assert_follows(stack: Trials, lone: Trials, steps: int = STEPS, tolerance: float = 1e-9) -> None:
    """Losses, weights and buffers of each replica are those of the lone trials."""
    for _ in range(steps):
        torch.testing.assert_close(stack.advance(), lone.advance(), rtol=tolerance, atol=tolerance)
    assert stack.step == lone.step == steps
    for ours, theirs in zip(stack.gradient_norms, lone.gradient_norms, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert len(ours) == len(theirs) > 0
    for ours, theirs in zip(stack.models, lone.models, strict=True):
        torch.testing.assert_close(
            ours.state_dict(), theirs.state_dict(), rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme(scheme: str) -> None:
    spec = f"nn:decoder,scheme={scheme},depth=2,width=16,heads=2"
    stack, lone = (trials_of(make, spec, CONFIGS[1:]) for make in (TrialStack, LoneTrials))
    assert_follows(stack, lone, steps=2)  # a scheme tells in the first; the second has been stepped to


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("scheme", ["post", "ngpt", "depth-mup", "sigma-reparam"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_optimizer(optimizer: str, scheme: str, accumulation: int) -> None:
    eps = None if optimizer == "sgd" else EPS
    common = {"optimizer": optimizer, "eps": eps, "accumulation": accumulation}
    configs = [
        Recipe(lr=lr, warmup=warmup, clip=clip, weight_decay=decay, **common)  # type: ignore[arg-type]
        for lr, warmup, clip, decay in ((1e-2, 0, None, None), (3e-3, 3, 0.1, 0.1), (1e-3, 4, 1e3, 0.0))
    ]
    spec = f"nn:decoder,scheme={scheme},depth=1,width=16,heads=2"
    assert_follows(trials_of(TrialStack, spec, configs), trials_of(LoneTrials, spec, configs), steps=3)


TINY = "num_hidden_layers=2,hidden_size=16,num_attention_heads=2,intermediate_size=32,vocab_size=256"
MODELS = (
    "nn:encoder,depth=2,width=16,heads=2",
    "nn:encoder-decoder,depth=2,width=16,heads=2",
    "nn:vision,depth=2,width=16,heads=2,image=8",
    "nn:decoder,depth=2,width=16,heads=2,norm=batchnorm",
    "nn:decoder,depth=2,width=16,heads=2,tie=true,positions=rotary,kv_heads=1",
    "nn:decoder,depth=2,width=16,heads=2,softcap=5.0",
    "nn:decoder,depth=2,width=16,heads=2,value_residual=learnt,attention_gate=head,z_loss=0.1",
    "nn:decoder,depth=2,width=16,heads=2,qk_clip=0.001",
    "nn:decoder,depth=2,width=16,heads=2,residual_warmup=3",
    "nn:decoder,depth=2,width=32,heads=2,init=mup,base_width=16",
    "hf:t5,d_model=16,d_ff=32,num_layers=1,num_heads=2,d_kv=8,dropout_rate=0.0,vocab_size=256",
    f"hf:vit,{TINY.removesuffix(',vocab_size=256')},image_size=32,patch_size=8",
    f"hf:bert,{TINY},hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
)
SINGLE = (  # transformers take the loss in float32, where two ways of adding differ
    f"hf:llama,{TINY}",
    "hf:gpt2,n_layer=2,n_embd=16,n_head=2,vocab_size=256,attn_pdrop=0.0,resid_pdrop=0.0,embd_pdrop=0.0",
)


@pytest.mark.parametrize("spec", [*MODELS, *SINGLE])
def test_every_kind_of_model(spec: str) -> None:
    made = trials_of(many_trials, spec, CONFIGS)
    assert isinstance(made, TrialStack)
    tolerance = 1e-5 if spec in SINGLE else 1e-9
    assert_follows(made, trials_of(LoneTrials, spec, CONFIGS), steps=2, tolerance=tolerance)


def test_torchs_own_encoder_with_a_mask_and_a_last_batch_of_keywords() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def batches(seed: int) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
            padding = torch.rand(3, 5, generator=generator) < 0.3
            padding[:, 0] = False
            yield {"src": x, "src_key_padding_mask": padding}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(**batch) - batch["src"].roll(1, 1)).square().mean()

    stack, lone = (
        make([model(k) for k in range(3)], [batches(k) for k in range(3)], loss, CONFIGS)
        for make in (many_trials, LoneTrials)
    )
    assert isinstance(stack, TrialStack)
    assert_follows(stack, lone)


class Line(nn.Module):
    """x·weight, which turns to inf once the weight is past `wall`; counts its calls in two buffers."""

    def __init__(self, weight: float, wall: float = math.inf) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("wall", torch.tensor(wall, dtype=torch.float64))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.written: Tensor
        self.replaced: Tensor
        self.wall: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.written.add_(1)
        self.replaced = self.replaced + 1
        return torch.where(self.weight < self.wall, self.weight * x, math.inf)


def downhill(model: nn.Module, x: Tensor) -> Tensor:
    """A loss whose gradient pushes the weight up, by the learning rate under SGD."""
    return -model(x).mean()


def ones() -> Iterator[Tensor]:
    return itertools.repeat(torch.ones(4, dtype=torch.float64))


def lines(make: Callable[..., Trials], walls: Sequence[float], lr: float = 0.1) -> Trials:
    config = Recipe(optimizer="sgd", lr=lr, weight_decay=0.0)
    return make([Line(0.0, wall) for wall in walls], [ones() for _ in walls], downhill, [config] * len(walls))


WALLS = (math.inf, 0.2, math.inf, 0.5)


@pytest.mark.parametrize("make", [TrialStack, LoneTrials])
def test_a_replica_whose_loss_is_not_finite_freezes_alone(make: Callable[..., Trials]) -> None:
    together = lines(make, WALLS)
    free = lines(LoneTrials, [math.inf])
    for _ in range(6):
        together.advance()
        free.advance()
    assert together.live == [0, 2]
    assert [len(losses) for losses in together.losses] == [6, 3, 6, 4]
    assert [math.isfinite(losses[-1]) for losses in together.losses] == [True, False, True, False]
    for k in (0, 2):
        assert together.losses[k] == pytest.approx(free.losses[0], abs=1e-12)
    # What stands still keeps the weight at which it failed, and its buffers moved in that forward too.
    for k, calls in ((1, 3), (3, 4)):
        model = together.models[k]
        assert isinstance(model, Line)
        assert model.weight.item() >= WALLS[k]
        assert model.written.item() == model.replaced.item() == calls


@pytest.mark.parametrize("make", [TrialStack, LoneTrials])
def test_dropping_leaves_the_others_on_their_way_and_an_empty_stack_stands_still(
    make: Callable[..., Trials],
) -> None:
    spec = "nn:decoder,depth=1,width=16,heads=2"
    stack, lone = trials_of(make, spec, CONFIGS), trials_of(LoneTrials, spec, CONFIGS)
    stack.advance()
    stack.drop(1)
    stack.drop(1)
    frozen = copy.deepcopy(stack.models[1].state_dict())
    for _ in range(STEPS - 1):
        assert len(stack.advance()) == 2
    for _ in range(STEPS):
        lone.advance()
    assert stack.live == [0, 2]
    assert len(stack.losses[1]) == 1
    for parameter in stack.models[1].parameters():  # it does not keep the stack in memory
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize
    torch.testing.assert_close(stack.models[1].state_dict(), frozen, rtol=0, atol=0)
    for k in (0, 2):
        torch.testing.assert_close(stack.losses[k], lone.losses[k], rtol=1e-9, atol=1e-9)
    stack.drop(0)
    stack.drop(2)
    assert stack.advance() == []
    assert stack.step == STEPS


@pytest.mark.parametrize("make", [TrialStack, LoneTrials])
def test_models_show_the_step_their_gradients_on_demand_and_are_exported(make: Callable[..., Trials]) -> None:
    trials = lines(make, (math.inf, math.inf))
    trials.advance()
    trials.share_gradients(1)
    shown = trials.models[1]
    assert isinstance(shown, Line)
    assert shown.weight.item() == pytest.approx(0.1)
    assert shown.weight.grad is not None
    assert shown.weight.grad.item() == -1.0
    assert shown.unused.grad is None
    other = Line(5.0)
    trials.export(1, other)
    assert other.weight.item() == shown.weight.item()
    trials.advance()
    assert other.weight.item() == pytest.approx(0.1)


def test_a_parameter_that_the_loss_does_not_reach_is_not_decayed() -> None:
    config = Recipe(optimizer="adamw", lr=0.1, weight_decay=0.5)
    stack = TrialStack([Line(1.0), Line(2.0)], [ones(), ones()], downhill, [config, config])
    stack.advance()
    for model in stack.models:
        assert isinstance(model, Line)
        assert torch.equal(model.unused, torch.ones(2, dtype=torch.float64))


def test_dropout_draws_for_each_replica_and_the_seed_repeats_them() -> None:
    def losses() -> list[float]:
        torch.manual_seed(3)
        config = Recipe(lr=1e-3)
        subject = load("nn:decoder,depth=1,width=16,heads=2,dropout=0.5", batch_size=2, seq_len=8)
        models = [copy.deepcopy(subject.model).train() for _ in range(3)]
        feeds = [subject.batches() for _ in models]
        stack = TrialStack(models, feeds, lambda model, batch: subject.loss(batch, model), [config] * 3)
        return stack.advance()

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first


@pytest.mark.parametrize("limits", [(math.inf, 0.1), (0.1, 10.0), (math.inf, math.inf)])
@pytest.mark.parametrize("largest", [1.0, math.inf, math.nan])
def test_clipping_is_torchs_replica_by_replica(limits: tuple[float, ...], largest: float) -> None:
    gradients = [torch.randn(2, 3, 2), torch.randn(2)]
    gradients[1][0] = largest
    expected = [[gradient[k].clone() for gradient in gradients] for k in range(2)]
    for limit, alone in zip(limits, expected, strict=True):
        if math.isfinite(limit):
            nn.utils.clip_grad_norm_([holder(gradient) for gradient in alone], limit)
    clip_each(gradients, torch.tensor(limits, dtype=torch.float64))
    for k, alone in enumerate(expected):
        torch.testing.assert_close([gradient[k] for gradient in gradients], alone, equal_nan=True)


def holder(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_plain_dropout_draws_for_each_replica_too() -> None:
    """Attention's own dropout, above, is drawn over all replicas in one call whatever `vmap` is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    models = [copy.deepcopy(model) for _ in range(3)]
    feeds = [itertools.repeat(torch.ones(2, 4)) for _ in models]
    stack = TrialStack(models, feeds, lambda m, x: m(x).square().mean(), [Recipe(lr=1e-3)] * 3)
    assert len(set(stack.advance())) == 3


def test_betas_of_a_stack_are_those_of_its_configs() -> None:
    config = Recipe(optimizer="adam", lr=1e-2, beta1=0.5, beta2=0.7, eps=EPS)
    stack, lone = (
        make([nn.Linear(4, 2).double().requires_grad_() for _ in range(2)], feeds, squares, [config] * 2)
        for make, feeds in ((TrialStack, slopes()), (LoneTrials, slopes()))
    )
    for k in range(2):
        lone.export(k, stack.models[k])
    assert_follows(stack, lone)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2]).square().mean()


def slopes() -> list[Iterator[Tensor]]:
    """Batches of two replicas."""
    return [
        iter([(k + 1.0) * torch.arange(8.0).view(2, 4).double() + n for n in range(STEPS)]) for k in range(2)
    ]


def test_the_gradient_norm_counts_scalars() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * (self.weight * x).sum()

    x = torch.tensor([1.0, 2.0, 3.0])
    models = [Scaled() for _ in range(2)]
    stack = TrialStack(
        models,
        [itertools.repeat(x) for _ in models],
        lambda model, batch: model(batch),
        [Recipe(lr=1e-3)] * 2,
    )
    stack.advance()
    expected = math.sqrt(4 * (1 + 4 + 9) + 36)  # 2x by the weight, and the sum by the scale
    assert [norms[0] for norms in stack.gradient_norms] == pytest.approx([expected] * 2)
