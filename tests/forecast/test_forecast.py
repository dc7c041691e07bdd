"""The forecast: each outcome on a case of seconds, its figures by hand, and what it leaves alone."""

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Site, Stack
from normscope.forecast.evaluator import Evaluator, beyond_mean
from normscope.forecast.one_rate import ForecastInterrupted, _Run, forecast, forecast_measurements
from normscope.forecast.record import ForecastStep
from normscope.forecast.rule import (
    TIME_CONSTANT,
    Decision,
    at_full_rate,
    decide,
    pace,
    sinking_diversity,
)
from normscope.subjects import Subject
from normscope.train import TrialConfig, rate_factor

VOCABULARY, LENGTH, SEQUENCES = 11, 12, 4


class Tiny(nn.Module):
    """A causal language model of `nn.TransformerEncoder`, Post-LN."""

    def __init__(
        self, depth: int = 2, width: int = 16, dropout: float = 0.1, batch_first: bool = True
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout, batch_first=batch_first)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, ids_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids_BT.shape[1])
        x = self.embedding(ids_BT)
        x = self.encoder(x if self.batch_first else x.transpose(0, 1), mask=mask, is_causal=True)
        return self.head(x if self.batch_first else x.transpose(0, 1))


def norm_output(module: str) -> Site:
    return Site(module, 0, "aten.native_layer_norm.default", 0)


def anatomy_of(model: Tiny) -> Anatomy:
    """As the reading says it, written by hand: the forecast is tested without the reader."""
    layers = [f"encoder.layers.{i}" for i in range(len(model.encoder.layers))]
    exits = [norm_output(f"{layer}.norm2") for layer in layers]
    blocks = tuple(Block(layer, 0, (), end, end) for layer, end in zip(layers, exits, strict=True))
    return Anatomy((Stack("encoder", blocks, None, exits[-1]),))


def next_token(output: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def counting_batches(seed: int = 0):
    """Each token is the one before it plus one: easy, once tokens are told apart."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
        yield (start + torch.arange(LENGTH)) % VOCABULARY


def subject_of(model: nn.Module, loss_fn=next_token, batches=counting_batches) -> Subject:
    return Subject(
        model,
        next(iter(batches())),
        loss_fn,
        batches,
        seed=0,
        spec="tiny",
        input="counting",
        unigram_entropy=math.log(VOCABULARY),
    )


def tried(model: nn.Module, **options):
    subject = subject_of(model)
    return forecast(subject, anatomy_of(model), TrialConfig(**options))


def test_a_shallow_model_trains() -> None:
    said = tried(Tiny(), lr=3e-3)
    assert said.outcome == "trains"
    assert [step.step for step in said.curve] == [0, 5, 10, 20]
    assert said.curve[-1].loss < said.curve[0].loss
    assert said.curve[-1].update_ratio > 0
    assert set(said.curve[-1].gradients) == {"encoder.layers.0", "encoder.layers.1"}


class Merged(Tiny):
    """Tokens lose 6 digits of what parts them before the first block, and can never win them back."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.embedding.weight.data.sub_(self.embedding.weight.data.mean(0)).mul_(0).add_(1.0)
        return super().forward(ids_BT)


def test_tokens_that_are_all_the_same_collapse() -> None:
    said = tried(Merged(), lr=3e-3)
    assert said.outcome == "collapses"
    assert "token diversity" in said.reason


def test_a_loss_that_is_not_finite_diverges() -> None:
    model = Tiny()
    said = forecast(
        subject_of(model, lambda o, b: next_token(o, b) * math.nan), anatomy_of(model), TrialConfig()
    )
    assert said.outcome == "diverges"
    assert len(said.curve) == 2, "nothing is gained by more steps"


def test_a_rate_far_too_large_diverges() -> None:
    assert tried(Tiny(), optimizer="sgd", lr=1e4).outcome == "diverges"


def test_no_loss_and_no_steps_are_not_measured() -> None:
    model = Tiny()
    said = forecast(subject_of(model, None), anatomy_of(model), TrialConfig())
    assert (said.outcome, "loss" in said.reason) == ("not measured", True)
    assert tried(model, steps=0).outcome == "not measured"
    assert "requires a gradient" in tried(Tiny().requires_grad_(False)).reason
    (row,) = forecast_measurements(said)
    assert not row.measured
    assert said.reason in row.how


def test_a_model_whose_anatomy_is_unread_is_judged_by_its_loss() -> None:
    model = Tiny()
    said = forecast(subject_of(model), Anatomy(()), TrialConfig(lr=3e-3, steps=60))
    assert said.outcome == "trains", said.reason
    assert forecast(subject_of(model), Anatomy(()), TrialConfig(lr=1e-5, steps=2)).outcome == "undecided"


def test_diversity_is_that_of_the_last_hidden_state_in_eval_mode() -> None:
    model = Tiny(batch_first=False).train()
    subject, anatomy = subject_of(model), anatomy_of(model)
    loss, diversities = Evaluator(subject, anatomy, model).state()
    model.eval()
    with torch.no_grad():
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = model.encoder(model.embedding(subject.batch).transpose(0, 1), mask=mask, is_causal=True)
        states = hidden.transpose(0, 1).double()
    ratios = [((h - h.mean(0)) ** 2).sum() / (h**2).sum() for h in states]
    assert diversities["encoder"] == pytest.approx(float(sum(ratios)) / SEQUENCES, rel=1e-5)
    expected = next_token(model(subject.batch), subject.batch).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_beyond_mean_by_hand() -> None:
    gradient = torch.tensor([[[1.0, 0.0], [3.0, 2.0], [0.0, 0.0]]])
    expected = torch.tensor([[[-1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]])
    assert torch.equal(beyond_mean(gradient), expected), "a token that was not asked stays out of the mean"


def test_coherence_is_the_cosine_of_two_batches_token_gradients() -> None:
    model = Tiny().eval()
    subject, anatomy = subject_of(model), anatomy_of(model)
    pair = list(itertools.islice(counting_batches(), 2))
    gradients, alignments = [], []
    for batch in pair:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = model.encoder(model.embedding(batch), mask=mask, is_causal=True)
        (pull,) = torch.autograd.grad(next_token(model.head(hidden), batch), hidden, retain_graph=True)
        whole = pull
        asked = pull[:, :-1]  # the last token predicts nothing
        pull = torch.cat([asked - asked.mean((0, 1)), torch.zeros_like(pull[:, -1:])], 1)
        weights = list(model.encoder.layers[0].parameters())
        spread = hidden - hidden.mean(1, keepdim=True)
        alignments.append(-F.cosine_similarity(whole.flatten(), spread.flatten(), dim=0).item())
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(hidden, weights, pull)]))
    expected = F.cosine_similarity(*gradients, dim=0).item()
    coherence, aligned = Evaluator(subject, anatomy, model).pull(pair)
    assert coherence == pytest.approx(expected, rel=1e-4)
    assert aligned == pytest.approx(sum(alignments) / 2, rel=1e-4)


def test_a_repeated_batch_is_compared_half_against_half() -> None:
    model = Tiny(batch_first=False).eval()
    evaluator = Evaluator(subject_of(model), anatomy_of(model), model)
    batch = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    pulls = evaluator.pulls(batch, halves=True)
    mine = []
    for half in (slice(0, 2), slice(2, 4)):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = model.encoder(model.embedding(batch[half]).transpose(0, 1), mask=mask, is_causal=True)
        loss = next_token(model.head(hidden).transpose(0, 1), batch[half]) / 2
        (pull,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        weights = list(model.encoder.layers[0].parameters())
        mine.append(torch.autograd.grad(hidden, weights, beyond_mean(pull)))
    for ours, theirs in zip(pulls, mine, strict=True):
        for a, b in zip(ours.gradients[0], theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    alone = subject_of(model, batches=lambda: iter([batch[:1]]))
    assert Evaluator(alone, anatomy_of(model), model).pull([batch[:1]]) == (None, None), (
        "nothing to compare with"
    )


def test_the_model_the_generators_and_the_threads_setting_stay_as_they_were() -> None:
    model = Tiny().eval()
    model.encoder.layers[0].train()
    model.head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    tried(model, lr=1e-2, steps=3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert not model.head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert torch.tensor([1e-39]).mul(1.0).item() != 0.0, "the caller does not flush denormals"


def test_the_same_seed_says_the_same() -> None:
    assert tried(Tiny(), steps=5) != tried(Tiny(), steps=5), "two initialisations"
    model = Tiny()
    assert tried(model, steps=5) == tried(model, steps=5)
    assert tried(model, steps=5).curve != tried(model, steps=5, seed=1).curve, "dropout follows the seed"


def test_a_loss_that_holds_on_to_the_original_is_trained_in_the_original_and_restored() -> None:
    model = Tiny(dropout=0.0)
    before = model.head.weight.detach().clone()
    subject = subject_of(model, lambda output, batch: next_token(model(batch), batch))
    said = forecast(subject, anatomy_of(model), TrialConfig(lr=3e-3))
    assert said.curve[-1].loss < said.curve[0].loss
    assert torch.equal(model.head.weight, before)


def test_a_single_batch_is_repeated() -> None:
    model = Tiny()
    batch = next(counting_batches())
    subject = subject_of(model, batches=lambda: iter([batch]))
    assert forecast(subject, anatomy_of(model), TrialConfig(lr=3e-3)).outcome == "trains"


def test_an_interrupt_hands_over_what_was_seen() -> None:
    model = Tiny()

    def interrupt(step: int, steps: int) -> None:
        if step == 12:
            raise KeyboardInterrupt

    before = model.head.weight.detach().clone()
    with pytest.raises(KeyboardInterrupt) as stop:
        forecast(subject_of(model), anatomy_of(model), TrialConfig(), interrupt)
    assert isinstance(stop.value, ForecastInterrupted)
    partial = stop.value.forecast
    assert (partial.outcome, [s.step for s in partial.curve]) == ("not measured", [0, 5, 10])
    assert "interrupted after step 10 of 20" in partial.reason
    assert torch.equal(model.head.weight, before)


def test_progress_counts_every_step() -> None:
    model = Tiny()
    seen: list[tuple[int, int]] = []
    forecast(subject_of(model), anatomy_of(model), TrialConfig(lr=3e-3), lambda *at: seen.append(at))
    assert seen == [(step, 20) for step in range(20)] + [(20, 20)]


def test_measurements_carry_the_curve() -> None:
    said = tried(Tiny(), lr=3e-3)
    rows = {(row.quantity, row.site): row for row in forecast_measurements(said)}
    assert rows["forecast/step", ""].value == (0.0, 5.0, 10.0, 20.0)
    assert rows["forecast/loss", ""].value == tuple(step.loss for step in said.curve)
    assert rows["forecast/diversity", ""].value == rows["forecast/diversity", "encoder"].value
    assert rows["forecast/unigram-entropy", ""].value == pytest.approx(math.log(VOCABULARY))


def curve(diversity: float, coherence: float, aligned: float) -> list[ForecastStep]:
    start = ForecastStep(0, None, 5.9, {"encoder": 0.06})
    return [start, ForecastStep(20, 3.3, 3.3, {"encoder": diversity}, coherence, alignment=aligned)]


@pytest.mark.parametrize(
    ("diversity", "coherence", "aligned", "outcome"),
    [
        (1.1e-7, 0.02, 0.009, "collapses"),  # nn.TransformerEncoder, 12 layers, d 256, Adam 3e-4: measured
        (1.1e-14, 0.04, 0.000, "collapses"),  # the same at 1e-3
        (1.1e-14, 0.90, 0.100, "collapses"),  # beyond float32: nothing is left to agree on
        (9.3e-5, 0.10, 0.016, "trains"),  # the same at 1e-4
        (5.0e-5, 0.38, 0.092, "trains"),  # GPT-2 124M at 3e-4
        (4.3e-5, 0.56, 0.051, "trains"),  # OPT, 12 layers, d 128, Post-LN, 3e-4
        (2.0e-6, 0.03, 0.003, "collapses"),  # nn.TransformerEncoder, 24 layers, d 128, Adam 1e-4
        (1.3e-9, 0.25, 0.013, "collapses"),  # 12 layers, d 128, Adam 1e-3: agreeing on very little
        (2.4e-1, 0.17, -0.014, "trains"),  # BERT, 12 layers, d 128, 1e-4
        (3.0e-4, -0.05, 0.0, "plateau"),  # not far down, but nothing pulls tokens apart
        (1.0e-4, 0.05, 0.003, "undecided"),  # between noise and enough
        (
            2.0e-7,
            0.32,
            0.020,
            "collapses",
        ),  # the first again with another seed
        (4.4e-7, 0.40, 0.021, "collapses"),  # 10 layers, d 96, Adam 1e-3: agreeing, and stuck all the same
    ],
)
def test_the_rule_on_measured_states(
    diversity: float, coherence: float, aligned: float, outcome: str
) -> None:
    assert decide(curve(diversity, coherence, aligned), 3.313).outcome == outcome


def test_a_run_without_a_sign_of_failure_is_told_with_its_figures_only() -> None:
    said = decide([ForecastStep(0, None, 5.57, {"x": 0.19}), ForecastStep(20, 5.5, 5.4, {"x": 0.0055})], None)
    assert said.outcome == "trains"
    assert said.reason.startswith(
        "no sign of failure in 20 steps: the loss goes from 5.57 to 5.40, the token"
    )
    assert said.reason.endswith("from 1.9e-01 to 5.5e-03")


@pytest.mark.parametrize("step", [1, 3, 9, 10])
def test_a_few_steps_do_not_tell_that_a_run_trains(step: int) -> None:
    for looks in (
        [ForecastStep(0, None, 5.57, {"x": 0.19}), ForecastStep(step, 5.57, 5.57, {"x": 0.0055})],
        [
            ForecastStep(0, None, 5.57, {"x": 0.19}),
            ForecastStep(step, 5.57, 5.57, {"x": 1e-4}, coherence=0.9, alignment=0.1),
        ],
    ):
        said = decide(looks, 3.313)
        assert said.outcome == ("trains" if step >= 10 else "undecided")
        assert f"no sign of failure in {step} steps" in said.reason
        assert not said.in_doubt


def test_without_token_ids_nothing_but_a_dead_end_is_told() -> None:
    assert decide(curve(1e-6, 0.0, 0.0), None, tokens=False).outcome == "undecided"
    assert decide(curve(0.5, 0.9, 0.1), None, tokens=False).outcome == "undecided"
    assert decide(curve(1e-12, 0.9, 0.1), None, tokens=False).outcome == "collapses"
    start, risen = ForecastStep(0, None, 0.7, {}), ForecastStep(20, 1.4, 1.4, {"vit": 0.5})
    assert decide([start, risen], None).outcome == "diverges"
    assert decide([start, risen], None, tokens=False).outcome == "undecided", "random labels"


def test_a_loss_that_stopped_at_the_unigram_entropy_is_a_plateau_where_nothing_else_is_known() -> None:
    looks = [ForecastStep(step, loss, loss, {}) for step, loss in [(0, 5.9), (60, 3.35), (120, 3.34)]]
    assert decide(looks, 3.313).outcome == "plateau"
    assert decide(looks, None).outcome == "undecided"
    assert decide([looks[0], ForecastStep(20, 3.35, 3.35, {})], 3.313).outcome == "undecided"


def test_a_model_that_cannot_take_a_step_is_not_measured_with_the_reason() -> None:
    model = Tiny()

    def broken(output: Tensor, batch: Tensor) -> Tensor:
        return next_token(output.detach(), batch)

    said = forecast(subject_of(model, broken), anatomy_of(model), TrialConfig())
    assert said.outcome == "not measured"
    assert "does not require grad" in said.reason


def test_a_warmup_longer_than_the_trial_is_tried_without_it_first() -> None:
    model = Tiny()
    said = forecast(subject_of(model), anatomy_of(model), TrialConfig(lr=3e-3, warmup=100))
    assert (said.outcome, said.warmup) == ("trains", 100)
    hot = forecast(subject_of(model), anatomy_of(model), TrialConfig(optimizer="sgd", lr=1e4, warmup=100))
    assert hot.outcome == "diverges"
    assert hot.reason.startswith("with a ramp over 10 steps as without one")


def test_failing_without_a_warmup_only_is_needs_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([Decision("collapses", "gone"), Decision("trains", "fine")])
    tried_warmups = []

    def attempt(run: object, warmup: int) -> Decision:
        tried_warmups.append(warmup)
        return next(said)

    monkeypatch.setattr(_Run, "attempt", attempt)
    outcome = tried(Tiny(), warmup=100)
    assert (outcome.outcome, tried_warmups) == ("needs-warmup", [0, 10])
    assert "gone" in outcome.reason
    assert "fine" in outcome.reason


def test_a_second_look_settles_a_doubt() -> None:
    once = curve(1e-4, 0.09, 0.005)
    again = ForecastStep(25, 3.3, 3.3, {"encoder": 1e-4}, 0.13, alignment=0.005)
    assert decide([*once, again], 3.313).outcome == "trains"


def paced(*excesses: float, steps: int = 40, entropy: float = 3.0) -> list[ForecastStep]:
    """A healthy run's curve whose loss is so far over the entropy at the start, half way and at the end."""
    first, half, last = (entropy + excess for excess in excesses)
    return [
        ForecastStep(0, None, first, {"x": 0.5}),
        ForecastStep(steps // 2, half, half, {"x": 0.4}, recent_loss=half),
        ForecastStep(steps, last, last, {"x": 0.3}, 0.0, alignment=0.0, recent_loss=last),
    ]


def test_pace_is_the_falls_share_of_a_time_constant() -> None:
    looks = paced(2.4, 2.0, 2.0 * math.exp(-20 / TIME_CONSTANT))
    assert pace(looks, 3.0) == pytest.approx(1.0)
    assert pace(looks, None) is None
    assert pace(paced(0.4, 0.4, 0.4), 3.0) is None, "a start at the unigram entropy has no pace"
    assert pace(paced(2.4, 0.7, 0.7), 3.0) is None, "nor has a run that has come near it"
    assert pace(looks, 3.0, warmup=40) > 1.0, "steps of a warm-up are worth less"


@pytest.mark.parametrize(("fall", "outcome"), [(0.9, "slow"), (1.1, "trains"), (-0.5, "slow")])
def test_a_healthy_run_that_falls_too_slowly_is_slow(fall: float, outcome: str) -> None:
    said = decide(paced(2.4, 2.0, 2.0 * math.exp(-fall * 20 / TIME_CONSTANT)), 3.0)
    assert (said.outcome, said.score > 0, said.failed) == (outcome, outcome == "trains", False)


@pytest.mark.parametrize("warmup", [0, 1, 7, 40, 300])
def test_steps_at_full_rate_are_the_sum_of_the_schedule(warmup: int) -> None:
    config = TrialConfig(warmup=warmup)
    for steps in (0, 1, 6, 7, 8, 39, 60):
        full = sum(rate_factor(config, step) for step in range(steps))
        assert at_full_rate(steps, warmup) == pytest.approx(full)


def test_diversity_that_still_sinks_after_the_transient_counts_for_less() -> None:
    def looks(*seen: tuple[int, float]) -> list[ForecastStep]:
        return [ForecastStep(step, 3.0, 3.0, {"x": diversity}) for step, diversity in seen]

    assert sinking_diversity(looks((0, 1e-1), (20, 1e-4))) == 1e-4
    assert sinking_diversity(looks((20, 1e-4), (30, 1e-5))) == pytest.approx(1e-6)
    assert sinking_diversity(looks((20, 1e-4), (30, 1e-3))) == 1e-3, "rising adds nothing"
    assert sinking_diversity(looks((20, 0.0), (30, 0.0))) == 0.0


def test_a_score_is_over_zero_where_a_run_is_said_to_train_and_nowhere_else() -> None:
    generator = random.Random(0)
    outcomes = set()
    for _ in range(2000):
        first, half, last = sorted((generator.uniform(-0.5, 3.0) for _ in range(3)), reverse=True)
        diversity = 10 ** generator.uniform(-15, 0)
        looks = [
            ForecastStep(0, None, 3 + first, {"x": 0.5}),
            ForecastStep(20, 3 + half, 3 + half, {"x": diversity}, recent_loss=3 + half),
            ForecastStep(
                40,
                3 + last,
                3 + last,
                {"x": diversity},
                generator.uniform(-0.2, 1),
                alignment=generator.uniform(-0.1, 0.2),
                recent_loss=3 + last - generator.choice((0.0, 0.5)),
            ),
        ]
        said = decide(looks, 3.0)
        outcomes.add(said.outcome)
        if said.outcome != "undecided":
            assert (said.score > 0) == (said.outcome == "trains"), said
    assert outcomes == {"trains", "slow", "plateau", "collapses", "undecided"}


def test_recent_loss_is_the_mean_of_the_last_training_losses() -> None:
    model = Tiny(dropout=0.0).train()
    said = tried(model, lr=1e-3, steps=15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in itertools.islice(counting_batches(), 15):
        optimizer.zero_grad()
        loss = next_token(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [look.step for look in said.curve] == [0, 5, 7, 10, 15]
    assert said.curve[0].recent_loss is None
    assert said.curve[1].recent_loss == pytest.approx(sum(losses[:5]) / 5, rel=1e-5)
    assert said.curve[-1].recent_loss == pytest.approx(sum(losses[5:]) / 10, rel=1e-5)


def test_a_schedule_does_not_fall_within_the_trial() -> None:
    model = Tiny(dropout=0.0)
    assert tried(model, schedule="cosine", steps=8) == tried(model, steps=8)
