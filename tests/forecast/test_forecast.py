"""Tests of the forecast: each outcome on a small model, its figures by hand, and the state it restores."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Site, Stack, read_anatomy
from normscope.forecast import watch
from normscope.forecast.evaluator import Evaluator, beyond_mean, differences
from normscope.forecast.one_rate import ForecastInterrupted, _Run, forecast, forecast_measurements
from normscope.forecast.rule import Decision
from normscope.forecast.thresholds import EXTENSION
from normscope.subjects import Subject, load, make_subject
from normscope.subjects.targets import batch_entropy
from normscope.train import Recipe

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
    """The anatomy of `Tiny`, written by hand so that the forecast is tested without the reader."""
    layers = [f"encoder.layers.{i}" for i in range(len(model.encoder.layers))]
    exits = [norm_output(f"{layer}.norm2") for layer in layers]
    blocks = tuple(Block(layer, 0, (), end, end) for layer, end in zip(layers, exits, strict=True))
    return Anatomy((Stack("encoder", blocks, None, exits[-1]),))


def next_token(output: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def counting_batches(seed: int = 0):
    """Each token is the one before it plus one: easy once the model distinguishes tokens."""
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
    return forecast(subject, anatomy_of(model), Recipe(**options))


def test_a_shallow_model_trains() -> None:
    said = tried(Tiny(), lr=3e-3)
    assert said.outcome == "trains"
    assert [step.step for step in said.curve] == [0, 5, 10, 20]
    assert said.curve[-1].loss < said.curve[0].loss
    assert said.curve[-1].update_ratio > 0
    assert set(said.curve[-1].gradients) == {"encoder.layers.0", "encoder.layers.1"}


class Merged(Tiny):
    """Token differences lose 6 digits before the first block and cannot recover."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.embedding.weight.data.sub_(self.embedding.weight.data.mean(0)).mul_(0).add_(1.0)
        return super().forward(ids_BT)


def test_tokens_that_are_all_the_same_collapse() -> None:
    said = tried(Merged(), lr=3e-3)
    assert said.outcome == "collapses"
    assert "token diversity" in said.reason


def test_a_loss_that_is_not_finite_diverges() -> None:
    model = Tiny()
    said = forecast(subject_of(model, lambda o, b: next_token(o, b) * math.nan), anatomy_of(model), Recipe())
    assert said.outcome == "diverges"
    assert len(said.curve) == 2, "nothing is gained by more steps"
    assert said.curve[-1].gradients == {}, "no gradient was computed, which is not a gradient of zero"
    (row,) = [row for row in forecast_measurements(said) if row.quantity == "forecast/gradient"]
    assert "no gradients" in row.how


def test_a_rate_far_too_large_diverges() -> None:
    assert tried(Tiny(), optimizer="sgd", lr=1e4).outcome == "diverges"


def test_no_loss_and_no_steps_are_not_measured() -> None:
    model = Tiny()
    said = forecast(subject_of(model, None), anatomy_of(model), Recipe())
    assert (said.outcome, "loss" in said.reason) == ("not measured", True)
    assert tried(model, steps=0).outcome == "not measured"
    assert "requires a gradient" in tried(Tiny().requires_grad_(False)).reason
    (row,) = forecast_measurements(said)
    assert not row.measured
    assert said.reason in row.how


def test_a_model_whose_anatomy_is_unread_is_judged_by_its_loss() -> None:
    model = Tiny()
    said = forecast(subject_of(model), Anatomy(()), Recipe(lr=3e-3, steps=60))
    assert said.outcome == "trains", said.reason
    assert forecast(subject_of(model), Anatomy(()), Recipe(lr=1e-5, steps=2)).outcome == "undecided"


def test_diversity_is_that_of_the_last_hidden_state_in_eval_mode() -> None:
    model = Tiny(batch_first=False).train()
    subject, anatomy = subject_of(model), anatomy_of(model)
    loss, diversities = Evaluator.of(subject, anatomy, model).state()
    model.eval()
    with torch.no_grad():
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = model.encoder(model.embedding(subject.batch).transpose(0, 1), mask=mask, is_causal=True)
        states = hidden.transpose(0, 1).double()
    plain, beyond = by_loops(states)
    assert diversities["encoder"] == pytest.approx(min(plain, 2 * beyond), rel=1e-5)
    expected = next_token(model(subject.batch), subject.batch).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def by_loops(states: Tensor) -> tuple[float, float]:
    """Differences of tokens (B, T, d), in all and beyond their positions, in float64, term by term."""
    number, length = states.shape[:2]
    whole, energy = states.mean((0, 1)), float(states.square().sum())
    plain = beyond = 0.0
    for b in range(number):
        for t in range(length):
            difference = states[b, t] - states[b].mean(0)
            plain += float(difference.square().sum())
            beyond += float((difference - states[:, t].mean(0) + whole).square().sum())
    return plain / energy, beyond * number / (number - 1) / energy


@pytest.mark.parametrize("size", [0.0, 0.5, 1.0, 3.0, 100.0])
def test_differences_against_loops(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 50, 6, generator=generator, dtype=torch.float64)
    states = tokens + size * torch.randn(50, 6, generator=generator, dtype=torch.float64) + 2
    assert differences(states) == pytest.approx(by_loops(states), rel=1e-6)


def test_differences_of_one_sequence_of_equal_tokens_and_of_nothing() -> None:
    tokens = torch.randn(4, 7, 6, dtype=torch.float64)
    sequence = tokens[0] - tokens[0].mean(0)
    plain = float(sequence.square().sum() / tokens[0].square().sum())
    assert differences(tokens[:1]) == (pytest.approx(plain), None)
    assert differences(torch.zeros(2, 3, 4)) == (0, 0)
    assert differences(torch.zeros(1, 3, 4)) == (0, None)
    assert differences(tokens[:1, :1].expand(3, 7, 6)) == (0, 0), "no round-off of a mean"
    same, beyond = differences(tokens[:1].expand(3, 7, 6))
    assert same == pytest.approx(plain)
    assert beyond == 0


class WithPositions(Tiny):
    """Takes the ids and the numbers of their places, which it adds as embeddings of a size."""

    def __init__(self, size: float, **options: bool) -> None:
        super().__init__(**options)
        self.places = nn.Embedding.from_pretrained(size * torch.randn(LENGTH, 16))

    def forward(self, ids_BT: Tensor, places_T: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(places_T))
        x = self.embedding(ids_BT if self.batch_first else ids_BT.T) + self.places(places_T)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("repeated", [True, False])
def test_positions_count_at_most_half_unless_all_sequences_are_the_same(
    repeated: bool, batch_first: bool
) -> None:
    torch.manual_seed(0)
    model = WithPositions(100.0, batch_first=batch_first)
    ids = torch.randint(VOCABULARY, (1 if repeated else 4, LENGTH)).expand(4, LENGTH)
    batch = {"ids_BT": ids if batch_first else ids.T, "places_T": torch.arange(LENGTH)}
    subject = make_subject(model, batch, lambda output, batch: output.square().mean())
    evaluator = Evaluator.of(subject, read_anatomy(subject), model)
    found = [list(evaluator.state()[1].values())[-1] for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] > 0.3 if repeated else found[0] < 0.01


def test_a_decoder_with_the_same_input_in_all_rows_has_the_plain_diversity() -> None:
    sizes = "encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2"
    given = load(f"hf:bart,{sizes},vocab_size=64,pad_token_id=0", seed=0)
    ids = torch.randint(1, 64, (4, 12))
    batch = {"input_ids": ids, "decoder_input_ids": ids[:1].expand(4, 12)}
    given = replace(given, batch=batch, loss_fn=lambda output, _: output.logits.square().mean())
    encoder, decoder = Evaluator.of(given, read_anatomy(given), given.model).state()[1].values()
    assert min(encoder, decoder) > 0.1


def test_a_sequence_of_one_token_has_no_diversity() -> None:
    model = Tiny()
    subject, anatomy = subject_of(model), anatomy_of(model)
    one = replace(subject, batch=subject.batch[:, :1], loss_fn=lambda output, batch: output.square().mean())
    assert Evaluator.of(one, anatomy, model).state()[1] == {}


@pytest.mark.parametrize("scaled", ["False", "True"])
def test_positions_of_a_published_model_drown_its_tokens_unless_they_are_scaled(scaled: str) -> None:
    sizes = "encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2"
    given = load(f"hf:marian,{sizes},vocab_size=64,pad_token_id=0,scale_embedding={scaled}", seed=0)
    given = replace(given, loss_fn=lambda output, batch: output.last_hidden_state.square().mean())
    found = Evaluator.of(given, read_anatomy(given), given.model).state()[1]
    assert len(found) == 2
    assert all((share < 1e-2) == (scaled == "False") for share in found.values()), found


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
    coherence, aligned = Evaluator.of(subject, anatomy, model).pull(pair)
    assert coherence == pytest.approx(expected, rel=1e-4)
    assert aligned == pytest.approx(sum(alignments) / 2, rel=1e-4)


def test_the_last_stacks_lower_weights_are_compared() -> None:
    model = Tiny(depth=2).eval()
    (whole,) = anatomy_of(model).stacks
    first, second = (Stack(block.path, (block,), None, block.exit) for block in whole.blocks)
    pair = list(itertools.islice(counting_batches(), 2))
    both, of_first, of_second = (
        Evaluator.of(subject_of(model), Anatomy(stacks), model).pull(pair)
        for stacks in ((first, second), (first,), (second,))
    )
    assert both == of_second != of_first


def test_a_repeated_batch_is_compared_half_against_half() -> None:
    model = Tiny(batch_first=False).eval()
    evaluator = Evaluator.of(subject_of(model), anatomy_of(model), model)
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
    assert Evaluator.of(alone, anatomy_of(model), model).pull([batch[:1]]) == (None, None), (
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
    said = forecast(subject, anatomy_of(model), Recipe(lr=3e-3))
    assert said.curve[-1].loss < said.curve[0].loss
    assert torch.equal(model.head.weight, before)


def test_a_single_batch_is_repeated() -> None:
    model = Tiny()
    batch = next(counting_batches())
    subject = subject_of(model, batches=lambda: iter([batch]))
    assert forecast(subject, anatomy_of(model), Recipe(lr=3e-3)).outcome == "trains"


def test_an_interrupt_hands_over_what_was_seen() -> None:
    model = Tiny()

    def interrupt(step: int, steps: int) -> None:
        if step == 12:
            raise KeyboardInterrupt

    before = model.head.weight.detach().clone()
    with pytest.raises(KeyboardInterrupt) as stop:
        forecast(subject_of(model), anatomy_of(model), Recipe(), interrupt)
    assert isinstance(stop.value, ForecastInterrupted)
    partial = stop.value.forecast
    assert (partial.outcome, [s.step for s in partial.curve]) == ("not measured", [0, 5, 10])
    assert "interrupted after step 10 of 20" in partial.reason
    assert torch.equal(model.head.weight, before)


def test_progress_counts_every_step() -> None:
    model = Tiny()
    seen: list[tuple[int, int]] = []
    forecast(subject_of(model), anatomy_of(model), Recipe(lr=3e-3), lambda *at: seen.append(at))
    assert seen == [(step, 20) for step in range(20)] + [(20, 20)]


def test_measurements_carry_the_curve() -> None:
    said = tried(Tiny(), lr=3e-3)
    rows = {(row.quantity, row.site): row for row in forecast_measurements(said)}
    assert rows["forecast/step", ""].value == (0.0, 5.0, 10.0, 20.0)
    assert rows["forecast/loss", ""].value == tuple(step.loss for step in said.curve)
    assert rows["forecast/diversity", ""].value == rows["forecast/diversity", "encoder"].value
    assert rows["forecast/unigram-entropy", ""].value == pytest.approx(math.log(VOCABULARY))


def test_a_model_that_cannot_take_a_step_is_not_measured_with_the_reason() -> None:
    model = Tiny()

    def broken(output: Tensor, batch: Tensor) -> Tensor:
        return next_token(output.detach(), batch)

    said = forecast(subject_of(model, broken), anatomy_of(model), Recipe())
    assert said.outcome == "not measured"
    assert "does not require grad" in said.reason


def test_a_parameter_that_the_loss_does_not_reach_is_no_reason_not_to_train() -> None:
    model = Tiny(depth=1)
    model.unused = nn.Linear(2, 2)
    assert len(tried(model, steps=2).curve) == 3


def test_a_model_in_eval_mode_trains_with_dropout() -> None:
    model = Tiny(depth=1, dropout=0.5)
    assert tried(model.train(), steps=2) == tried(model.eval(), steps=2)


@pytest.mark.parametrize(("in_doubt", "last"), [(False, 2), (True, 2 + EXTENSION)])
def test_a_trial_in_doubt_goes_on_once(monkeypatch: pytest.MonkeyPatch, in_doubt: bool, last: int) -> None:
    said = Decision("undecided", "who knows", in_doubt=in_doubt)
    monkeypatch.setattr(watch, "decide", lambda *args, **options: said)
    assert tried(Tiny(depth=1), steps=2).curve[-1].step == last


class Floats(Tiny):
    """`Tiny` on vectors (B, T, d) instead of token ids."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.encoder(x_BTD)


def test_gradients_of_batches_that_are_no_tokens_are_not_compared() -> None:
    model, batch = Floats(depth=1), torch.randn(SEQUENCES, LENGTH, 16)
    loss = lambda output, batch: output.pow(3).mean()  # noqa: E731
    subject = Subject(model, batch, loss, lambda: iter([batch]), 0, "floats", "noise")
    last = forecast(subject, anatomy_of(model), Recipe(steps=1)).curve[-1]
    assert (last.step, last.coherence, last.alignment) == (1, None, None)


def test_a_warmup_longer_than_the_trial_is_tried_without_it_first() -> None:
    model = Tiny()
    said = forecast(subject_of(model), anatomy_of(model), Recipe(lr=3e-3, warmup=100))
    assert (said.outcome, said.warmup) == ("trains", 100)
    hot = forecast(subject_of(model), anatomy_of(model), Recipe(optimizer="sgd", lr=1e4, warmup=100))
    assert hot.outcome == "diverges"
    assert hot.reason.startswith("with a warm-up over 10 steps as without one")


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


def test_a_whole_run_that_a_warmup_does_not_make_train_is_not_rescued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = iter([Decision("collapses", "gone"), Decision("slow", "above", score=-1.0, is_whole=True)])
    monkeypatch.setattr(_Run, "attempt", lambda run, warmup: next(said))
    found = tried(Tiny(), warmup=1000, steps=300)
    assert (found.outcome, found.trains) == ("slow", False)
    assert found.certainty == pytest.approx(0.01)


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


def test_each_training_loss_stands_beside_the_entropy_of_its_own_batch() -> None:
    subject = load("nn:decoder,depth=1,width=16,heads=2", batch_size=2, seq_len=16)
    batches = list(itertools.islice(subject.batches(), 15))
    said = forecast(subject, read_anatomy(subject), Recipe(steps=10))
    assert [step.batch_entropy for step in said.curve] == [
        None if step.step == 0 else batch_entropy(batches[step.step - 1]) for step in said.curve
    ]
    assert len({step.batch_entropy for step in said.curve}) == len(said.curve)
    subject.unigram_entropy = None
    said = forecast(subject, read_anatomy(subject), Recipe(steps=2))
    assert {step.batch_entropy for step in said.curve} == {None}


def test_without_a_loss_to_beat_a_run_is_not_sure_to_train() -> None:
    """It may be too slow, which only the loss to beat can tell."""

    def skewed():
        return (batch.clamp(max=6) for batch in counting_batches())

    model = Tiny()
    known = subject_of(model, batches=skewed)
    unknown = replace(known, unigram_entropy=None)
    sure, open_ = (forecast(each, anatomy_of(model), Recipe(lr=3e-3)) for each in (known, unknown))
    assert (sure.outcome, open_.outcome) == ("trains", "trains")
    assert (sure.certainty is None, open_.certainty) == (False, None)
    assert open_.reason.endswith("Whether it is too slow is not judged: the loss to beat is not known")
