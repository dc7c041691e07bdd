"""The wiring findings on whole models: each broken run gets its finding, its twin none of the family."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import normscope
from benchmarks import miswired
from benchmarks.miswired import CASES, Model
from normscope import Report, pipeline
from normscope.anatomy import Anatomy
from normscope.probes import PROBES, Measurements
from normscope.probes.parameters import Parameters
from normscope.probes.wiring.halves import update_rows
from normscope.probes.wiring.optimizers import optimizer_rows
from normscope.rules import Finding
from normscope.subjects import Subject
from normscope.train import Recipe

PRECISE = ("NS707", "NS713")
"""Findings of half-precision runs, in which the other one may be a note."""


def checked(*given: object, **options: object) -> Report:
    """A check without the probes that these findings do not read, which take most of its time."""
    torch.manual_seed(0)
    with few_probes():
        return normscope.check(*given, **{"steps": 0, "budget": "fast"} | options)  # type: ignore[arg-type]


@contextmanager
def few_probes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "PROBES", {name: PROBES[name] for name in ("gradient", "wiring")})
        for name in ("measure_jacobian", "measure_next_step"):
            patch.setattr(pipeline, name, lambda *given, **options: ())
        yield


def family(report: Report) -> list[Finding]:
    assert not [note for note in report.notes if "wiring" in note]
    return [finding for finding in report.findings if finding.code.startswith("NS7")]


def wiring(subject: Subject | nn.Module, **options: object) -> list[Finding]:
    return family(checked(subject, **options))


def found(subject: Subject | nn.Module, **options: object) -> dict[str, str]:
    return {finding.code: finding.severity.value for finding in wiring(subject, **options)}


@pytest.mark.parametrize("code", ["NS704", "NS707"])
def test_the_other_probes_have_no_part_in_the_findings(code: str) -> None:
    options = {"steps": 0, "budget": "fast", "lr": 1e-5}
    subject = CASES[code][1]()
    torch.manual_seed(0)
    whole = family(normscope.check(subject, **options))  # type: ignore[arg-type]
    assert code in {finding.code for finding in whole}
    assert wiring(subject, **options) == whole


@pytest.mark.parametrize("code", CASES)
def test_a_broken_run_gets_its_finding_and_its_twin_none(code: str) -> None:
    twin, broken = CASES[code]
    options = {"lr": 1e-5} if code == "NS707" else {}
    assert code in found(broken(), **options)
    others = found(twin(), **options)
    assert code not in others
    assert not {other: severity for other, severity in others.items() if severity != "note"}
    assert code in PRECISE or not others


@pytest.mark.parametrize(
    ("code", "site"), [("NS701", "layers.2.attention.out"), ("NS702", "layers.2.attention.out")]
)
def test_the_first_module_is_named(code: str, site: str) -> None:
    (finding,) = wiring(CASES[code][1]())
    assert finding.sites == (site,)
    assert finding.severity == "error"


class TakesTargets(Model):
    """(logits, loss) from a forward that takes its targets, as nanoGPT's; -1 is ignored."""

    def forward(self, ids_BT: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits_BTV = super().forward(ids_BT)
        loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits_BTV, loss


def given(targets: Tensor) -> dict[str, str]:
    report = checked(TakesTargets(), (miswired.text(), targets))
    return {f.code: f.severity.value for f in report.findings if f.code.startswith("NS7")}


def test_targets_are_found_however_the_labels_are_stored() -> None:
    ids = miswired.text()
    assert given(nn.functional.pad(ids[:, 1:], (0, 1), value=-1)) == {}
    assert given(ids) == {"NS712": "error"}


def test_labels_are_found_by_their_name_in_the_forward() -> None:
    assert given(torch.full_like(miswired.text(), -1)) == {"NS712": "error"}


def test_labels_of_weight_zero_are_ignored_too() -> None:
    subject = miswired.padded()
    plain = subject.loss_fn
    assert plain is not None
    subject.loss_fn = lambda output, batch: 0 * plain(output, batch)
    assert found(subject)["NS712"] == "error"


def test_one_huge_entry_is_found() -> None:
    def huge(model: Model) -> None:
        model.get_parameter("layers.3.mlp.0.weight")[0, 0] = 2.0**25

    assert found(miswired.trained(miswired.changed(huge)))["NS709"] == "warning"


def test_time_may_come_first() -> None:
    """Ids (T, B), as `nn.TransformerEncoder` takes them without batch_first."""

    class TimeFirst(Model):
        def forward(self, ids_TB: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids_TB.T).transpose(0, 1)

    def loss(logits_TBV: Tensor, ids_TB: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits_TBV[:-1].flatten(0, 1), ids_TB[1:].flatten())

    for breaks, expected in (("", {}), ("no mask", {"NS701": "error"}), ("reshape", {"NS702": "error"})):
        report = checked(TimeFirst(breaks), miswired.text().T.contiguous(), loss)
        codes = {f.code: f.severity.value for f in report.findings if f.code in ("NS701", "NS702")}
        assert codes == expected, breaks


def test_an_encoder_may_see_later_tokens_and_reconstruct_its_input() -> None:
    assert found(miswired.trained(Model("no mask"), miswired.shifted(0))) == {}


def test_labels_shifted_twice_are_a_warning() -> None:
    (finding,) = wiring(miswired.trained(Model(), miswired.shifted(2)))
    assert (finding.code, finding.severity) == ("NS712", "warning")
    assert "or intended" in finding.message


def test_labels_that_are_all_ignored_are_an_error() -> None:
    subject = miswired.padded()
    subject.batch = {**subject.batch, "loss inputs": (torch.full((4, 64), -100),)}  # type: ignore[dict-item]
    assert found(subject)["NS712"] == "error"


@pytest.mark.parametrize("where", ["right", "left"])
def test_padding_of_either_side_in_the_loss_is_found(where: str) -> None:
    subject = miswired.padded(in_loss=True)
    if where == "left":
        batch = subject.batch
        assert isinstance(batch, dict)
        flipped = {name: batch[name].flip(1) for name in ("ids_BT", "attention_mask")}
        subject.batch = flipped | {"loss inputs": (batch["loss inputs"][0].flip(1),)}
    findings = wiring(subject)
    (finding,) = (f for f in findings if f.code == "NS703")
    assert "targets that count are padding" in finding.message
    assert f"on the {where}" in finding.evidence[0].how


def test_a_row_of_nothing_but_padding_gives_nan_and_is_named() -> None:
    subject = miswired.padded()
    assert isinstance(subject.batch, dict)
    mask = subject.batch["attention_mask"].clone()
    mask[3] = 0
    subject.batch = {**subject.batch, "attention_mask": mask}
    messages = [f.message for f in wiring(subject) if f.code == "NS703"]
    found_nan = torch.nn.functional.scaled_dot_product_attention(
        *(torch.randn(1, 1, 4, 4),) * 3, attn_mask=torch.zeros(4, 4, dtype=torch.bool)
    ).isnan()
    assert any("nothing but padding" in message for message in messages) == bool(found_nan.any())


def test_padding_in_a_causal_batch_without_a_mask_is_found_by_its_id() -> None:
    """labels=ids with padding left in: the commonest mistake."""
    ids = miswired.text() % 250 + 3
    ids[1, 40:], ids[2, 20:] = 0, 0
    model = Model()
    model.embedding.padding_idx = 0
    subject = miswired.trained(model)
    subject.batch = ids
    (finding,) = wiring(subject)
    assert (finding.code, finding.severity) == ("NS703", "warning")
    assert "targets" in finding.message


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_model_may_make_its_mask_from_the_padding_id(is_masked: bool) -> None:
    """Other ids in the padded places would be real tokens for it (BERT-pytorch)."""

    class Masks(Model):
        def forward(self, ids_BT: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids_BT, (ids_BT > 0).long() if is_masked else torch.ones_like(ids_BT))

    ids = miswired.text() % 250 + 3
    ids[1, 40:], ids[2, 20:] = 0, 0

    def loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        targets_BT = ids_BT.roll(5, 0).masked_fill(ids_BT == 0, -100)
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    model = Masks()
    model.embedding.padding_idx = 0
    subject = miswired.trained(model, loss)
    subject.batch = ids
    messages = [f.message for f in wiring(subject) if f.code == "NS703"]
    assert any("change real tokens' outputs" in message for message in messages) != is_masked


class TakesMask(Model):
    """An encoder that takes a mask of some name and does not use it."""

    def forward(self, ids_BT: Tensor, masked: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids_BT, torch.ones_like(ids_BT))


@pytest.mark.parametrize("where", ["scattered", "at the ends"])
def test_the_positions_that_a_masked_language_model_hides_are_no_padding(where: str) -> None:
    ids = miswired.text() % 250 + 3
    place = torch.arange(64)
    hidden = (ids % 4 == 0) if where == "scattered" else place >= torch.tensor([60, 50, 40, 30])[:, None]

    def loss(logits_BTV: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(logits_BTV[batch["masked"]], ids[batch["masked"]])

    batch = {"ids_BT": torch.where(hidden, 1, ids), "masked": hidden}
    report = checked(TakesMask(), batch, loss)
    assert not [f for f in report.findings if f.code == "NS703"]


def test_a_mask_of_any_name_with_runs_of_different_lengths_is_padding() -> None:
    ids = miswired.text() % 250 + 3
    padding = torch.arange(64) >= torch.tensor([64, 50, 40, 30])[:, None]
    ids = torch.where(padding, 0, ids)

    def loss(logits_BTV: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids.flatten())

    report = checked(TakesMask(), {"ids_BT": ids, "masked": padding}, loss)
    messages = " ".join(f.message for f in report.findings if f.code == "NS703")
    assert "real tokens' outputs" in messages
    assert "targets that count" in messages


class BatchSecond(nn.Module):
    """Attention that takes the samples for places, in a model that also needs an index of each place."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.places = nn.Embedding(256, miswired.WIDTH), nn.Embedding(64, miswired.WIDTH)
        self.attention = nn.MultiheadAttention(miswired.WIDTH, 2)
        self.head = nn.Linear(miswired.WIDTH, 256)

    def forward(self, ids_BT: Tensor, places_T: Tensor) -> Tensor:
        x_BTC = self.ids(ids_BT) + self.places(places_T)
        out: Tensor = self.head(x_BTC + self.attention(x_BTC, x_BTC, x_BTC)[0])
        return out


@pytest.mark.parametrize("length", [4, 6])
def test_as_many_places_as_samples_are_no_table_of_pairs(length: int) -> None:
    """With four samples of four places, a batch of three samples with an index of four places fails."""

    def loss(logits_BTV: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), batch["ids_BT"][:, 1:].flatten())

    batch = {"ids_BT": miswired.text()[:4, :length], "places_T": torch.arange(length)}
    findings = checked(BatchSecond(), batch, loss).findings
    assert [f.severity for f in findings if f.code == "NS702"] == ["error"]


class Starts(nn.Module):
    """x + α·F(x) with α = 0, whose output matrix is zero too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.alpha = Model(), nn.Parameter(torch.zeros(()))
        for layer in self.inner.layers:
            nn.init.zeros_(layer.attention.out.weight)
            nn.init.zeros_(layer.mlp[2].weight)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.inner(ids_BT) * (1 + self.alpha)


def test_a_zero_start_that_learns_is_healthy() -> None:
    subject = miswired.trained(Starts())
    assert found(subject) == {}
    (row,) = (row for row in checked(subject).measurements if row.quantity == "wiring/num-freed")
    assert row.value


def test_a_stack_of_zeros_learns_nothing() -> None:
    def zeros(model: Model) -> None:
        for index in (0, 2):
            model.layers[3].mlp[index].weight.zero_()
        model.layers[3].mlp[0].bias.zero_()

    findings = [f for f in wiring(miswired.trained(miswired.changed(zeros))) if f.code == "NS704"]
    assert findings
    assert "layers.3.mlp.0.weight" in findings[0].sites


def test_what_stands_behind_round_gets_exactly_zero() -> None:
    class Rounded(Model):
        def forward(self, ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x_BTC = self.layers[0](self.embedding(ids_BT))
            for layer in self.layers[1:]:
                x_BTC = layer(torch.round(x_BTC * 8) / 8)
            return self.head(self.norm(x_BTC))

    (finding,) = (f for f in wiring(miswired.trained(Rounded())) if f.code == "NS704")
    assert finding.severity == "error"
    assert "embedding.weight" in finding.sites


class Short(Model):
    """The last layer is never called, and a pooler's output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(miswired.WIDTH, miswired.WIDTH)

    def forward(self, ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for layer in self.layers[:-1]:
            x_BTC = layer(x_BTC)
        self.pooler(x_BTC)
        return self.head(self.norm(x_BTC))


def test_a_layer_that_is_never_called_is_a_warning_and_a_pooler_a_note() -> None:
    findings = {f.severity.value: f for f in wiring(miswired.trained(Short())) if f.code == "NS704"}
    assert "layers.5.mlp.0.weight" in findings["warning"].sites
    assert set(findings["note"].sites) == {"pooler.weight", "pooler.bias"}


class Experts(nn.Module):
    """Two experts, of which the tokens of the first batch reach only one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.experts = nn.ModuleList(nn.Linear(miswired.VOCABULARY, miswired.VOCABULARY) for _ in range(2))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.experts[int(ids_BT[0, 0]) % 2](self.inner(ids_BT))


def test_an_expert_that_another_batch_reaches_is_healthy() -> None:
    ids = miswired.text()
    batches = [torch.where(torch.arange(64) == 0, ids - ids % 2 + parity, ids) for parity in (0, 1)]
    report = checked(Experts(), iter(batches), miswired.shifted())
    assert not [f for f in report.findings if f.code == "NS704"]


def test_freezing_the_lowest_layers_is_fine_tuning() -> None:
    assert found(miswired.trained(miswired.changed(miswired.freeze_lowest))) == {"NS705": "note"}


def test_an_optimizer_of_another_model_and_one_that_holds_twice() -> None:
    model, other = Model(), Model()
    subject = miswired.stepped(model, miswired.adamw(other))
    assert [f.severity.value for f in wiring(subject) if f.code == "NS706"] == ["error", "warning"]
    subject = miswired.stepped(model, miswired.adamw(model))
    assert subject.run is not None
    subject.run.optimizer = [miswired.adamw(model), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    findings = wiring(subject)
    assert [(f.code, f.sites) for f in findings] == [("NS706", ("head.weight", "head.bias"))]


def test_a_moving_average_inside_the_model_is_no_untrained_part() -> None:
    """As in the tasks of timm: its weights are in no optimizer, and the loss does not need them."""
    model = Model()
    optimizer = miswired.adamw(model)
    model.average = copy.deepcopy(model)
    subject = miswired.stepped(model, optimizer)
    assert {(f.code, f.severity.value) for f in wiring(subject)} <= {("NS704", "note"), ("NS709", "note")}


class Tempered(nn.Module):
    """Next-token loss of logits over a trained temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        return miswired.shifted()(logits_BTV * self.log_temperature.exp(), ids_BT)


def test_a_trained_temperature_of_the_criterion_is_no_foreign_tensor() -> None:
    model, criterion = Model(), Tempered()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=3e-4)
    subject = miswired.stepped(model, optimizer)
    assert [f.severity.value for f in wiring(subject) if f.code == "NS706"] == ["warning"]
    subject.loss_fn = criterion
    assert found(subject) == {}
    subject.loss_fn, criterion.log_temperature.grad = miswired.shifted(), torch.zeros(())
    assert found(subject) == {}


def test_foreign_tensors_beside_a_recorded_loss_are_a_note() -> None:
    subject = miswired.padded()
    optimizer = torch.optim.AdamW([*subject.model.parameters(), nn.Parameter(torch.zeros(()))], lr=3e-4)
    subject.run = normscope.Run(model=subject.model, batches=subject.batch, optimizer=optimizer)
    assert found(subject) == {"NS706": "note"}


def test_decay_without_the_users_own_optimizer_is_not_judged() -> None:
    assert found(miswired.trained(Model()), lr=1.0) == {}


def test_a_batch_norm_without_running_statistics_is_named() -> None:
    class Normed(Model):
        def __init__(self, keeps: bool) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(miswired.WIDTH, track_running_stats=keeps)

        def forward(self, ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x_BTC = self.batch_norm(self.embedding(ids_BT).transpose(1, 2)).transpose(1, 2)
            for layer in self.layers:
                x_BTC = layer(x_BTC)
            return self.head(self.norm(x_BTC))

    assert "NS702" not in found(miswired.trained(Normed(keeps=True)))
    assert found(miswired.trained(Normed(keeps=False)))["NS702"] == "note"


def test_an_infinite_weight_that_the_batch_does_not_reach_is_found_once() -> None:
    def break_(model: Model) -> None:
        model.embedding.weight[255, 0] = -torch.inf

    report = normscope.check(miswired.trained(miswired.changed(break_)), steps=0, budget="fast")
    named = [(f.code, f.sites) for f in report.findings if f.sites == ("embedding.weight",)]
    assert named == [("NS506", ("embedding.weight",))]


def test_weights_and_gradients_are_as_before() -> None:
    subject = miswired.trained(Starts())
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    wiring(subject)
    assert all(torch.equal(p, before[name]) for name, p in subject.model.named_parameters())
    assert all(p.grad is None for p in subject.model.parameters())


class Pairs(nn.Module):
    """Similarities (B, B) of two encoders' outputs."""

    def __init__(self, breaks: str = "no mask") -> None:
        super().__init__()
        self.left, self.right = Model(breaks), Model("no mask")

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = (
            nn.functional.normalize(m(x).mean(1), dim=-1) for m, x in ((self.left, a), (self.right, b))
        )
        return 10 * left @ right.T


def test_similarities_with_negatives_of_the_batch_mix_samples_by_design() -> None:
    def loss(logits_BB: Tensor, batch: object) -> Tensor:
        return nn.functional.cross_entropy(logits_BB, torch.arange(len(logits_BB)))

    batch = {"a": miswired.text(), "b": miswired.text().flip(1)}
    report = checked(Pairs(), batch, loss)
    assert not [f for f in report.findings if f.code == "NS702"]
    assert any(
        "own sample" in row.how for row in report.measurements if row.quantity == "wiring/other-samples"
    )


def test_outputs_for_every_pair_of_samples_mix_them_by_design_without_a_loss_too() -> None:
    batch = {"a": miswired.text(), "b": miswired.text().flip(1)}
    report = checked(Pairs(), batch)
    assert not [f for f in report.findings if f.code == "NS702"]
    (row,) = (row for row in report.measurements if row.quantity == "wiring/other-samples")
    assert "every pair" in row.how


class PairFeatures(Pairs):
    """Features (B, B, C) of every pair, as of X-CLIP's texts beside each video."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a).mean(1)[:, None] * self.right(b).mean(1)[None]


def test_features_of_every_pair_of_samples_mix_them_by_design() -> None:
    batch = {"a": miswired.text(), "b": miswired.text().flip(1)}
    report = checked(PairFeatures(), batch)
    (row,) = (row for row in report.measurements if row.quantity == "wiring/other-samples")
    assert "every pair" in row.how
    assert not [f for f in report.findings if f.code == "NS702"]


class MixedLabels(Pairs):
    """As many labels as samples, each from the mean over all samples."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.left(a).mean(1)[:, : miswired.text().shape[0]] + self.right(b).mean((0, 1))[:1]


def test_a_square_output_that_stays_as_wide_is_no_table_of_pairs() -> None:
    batch = {"a": miswired.text(), "b": miswired.text().flip(1)}
    report = checked(MixedLabels(), batch)
    assert [f.severity for f in report.findings if f.code == "NS702"] == ["error"]


class Routed(nn.Module):
    """Experts of which each takes at most its share of the batch's tokens, first come, first served."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity, width = capacity, miswired.WIDTH
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        weight_N, choice_N = self.router(x_NC).softmax(-1).max(-1)
        out_NC = torch.zeros_like(x_NC)
        for number, expert in enumerate(self.experts):
            rows = (choice_N == number).nonzero().flatten()[: int(self.capacity * len(x_NC) / 4)]
            out_NC = out_NC.index_add(0, rows, expert(x_NC[rows]) * weight_N[rows, None])
        return out_NC.view_as(x_BTC)


@pytest.mark.parametrize(
    ("capacity", "breaks", "expected"),
    [(1.0, "", "note"), (4.0, "", None), (1.0, "reshape", "error"), (4.0, "reshape", "error")],
)
def test_experts_with_a_capacity_limit_are_a_note(capacity: float, breaks: str, expected: str | None) -> None:
    torch.manual_seed(0)
    model = Model(breaks)
    block = model.layers[2]
    assert isinstance(block, miswired.Block)
    nn.init.normal_(model.embedding.weight)
    block.mlp = Routed(capacity)  # type: ignore[assignment]
    findings = [f for f in wiring(miswired.trained(model)) if f.code == "NS702"]
    assert [f.severity.value for f in findings] == ([expected] if expected else [])
    assert ("capacity" in "".join(f.message for f in findings)) == (expected == "note")


def test_a_causal_mask_over_the_batch_is_found() -> None:
    """Samples see those before them, because the model takes time first and gets batches first."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = miswired.WIDTH
            self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, width, norm_first=True) for _ in range(3)
            )

        def forward(self, ids_BT: Tensor) -> Tensor:
            x_BTC = self.embedding(ids_BT)
            mask = nn.Transformer.generate_square_subsequent_mask(len(ids_BT))
            for layer in self.layers:
                x_BTC = layer(x_BTC, mask)
            return self.head(x_BTC)

    assert found(miswired.trained(Crossed()))["NS702"] == "error"


def test_the_first_of_a_run_may_be_a_true_end() -> None:
    """The end of the text and padding often share an id; the model must learn to end."""
    ids = miswired.text() % 250 + 3
    ids[1, 40:], ids[2, 20:] = 0, 0

    def loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
        targets_BT = ids_BT[:, 1:].masked_fill(ids_BT[:, :-1] == 0, -100)
        return nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), targets_BT.flatten())

    model = Model()
    model.embedding.padding_idx = 0
    subject = miswired.trained(model, loss)
    subject.batch = ids
    assert found(subject) == {}


def test_what_was_tried_on_starved_weights_is_undone() -> None:
    subject = miswired.trained(Short())
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    assert {finding.code for finding in wiring(subject)} == {"NS704"}
    assert all(torch.equal(p, before[name]) for name, p in subject.model.named_parameters())


def test_the_padding_row_of_an_embedding_needs_no_gradient() -> None:
    class Typed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.types = nn.Embedding(2, miswired.WIDTH, padding_idx=0)
            nn.init.normal_(self.types.weight)

        def forward(self, ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x_BTC = self.embedding(ids_BT) + self.types(torch.zeros_like(ids_BT))
            for layer in self.layers:
                x_BTC = layer(x_BTC)
            return self.head(self.norm(x_BTC))

    assert found(miswired.trained(Typed())) == {"NS704": "note"}


def test_a_lone_vector_without_gradient_is_no_finding() -> None:
    class Biased(Model):
        def forward(self, ids_BT: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x_BTC = self.embedding(ids_BT)
            for layer in self.layers:
                x_BTC = layer(x_BTC)
            return nn.functional.linear(self.norm(x_BTC), self.head.weight)

    assert found(miswired.trained(Biased())) == {}


def test_adapters_in_frozen_branches_are_fine_tuning() -> None:
    class Adapted(nn.Module):
        """W x + B A x with W frozen, and B = 0 at the start."""

        def __init__(self, given: nn.Linear) -> None:
            super().__init__()
            self.base = given.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(4, given.in_features) / 8)
            self.up = nn.Parameter(torch.zeros(given.out_features, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    model = Model()
    for index in (1, 3):  # not the lowest layers
        layer = model.layers[index]
        assert isinstance(layer, miswired.Block)
        layer.requires_grad_(False)
        layer.attention.qkv = Adapted(layer.attention.qkv)  # type: ignore[assignment]
        layer.mlp[0] = Adapted(layer.mlp[0])  # type: ignore[arg-type]
    assert set(found(miswired.trained(model)).values()) <= {"note"}


def test_trained_biases_in_frozen_branches_are_fine_tuning() -> None:
    def biases_only(model: Model) -> None:
        for index in (1, 3):
            for name, parameter in model.layers[index].named_parameters():
                parameter.requires_grad_(name.endswith("bias"))

    assert found(miswired.trained(miswired.changed(biases_only))) == {"NS705": "note"}


def with_warmup(model: Model, lr: float) -> Subject:
    """The user's own AdamW at a schedule whose first rate is 0."""
    optimizer = miswired.adamw(model, lr=lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    subject = miswired.stepped(model, optimizer)
    subject.run = normscope.Run(model=model, batches=subject.batch, optimizer=optimizer, scheduler=scheduler)
    return subject


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adam, False),
        (partial(torch.optim.Adam, decoupled_weight_decay=True), True),
        (torch.optim.NAdam, False),
        (torch.optim.SGD, True),
        (partial(torch.optim.SGD, momentum=0.9), False),
    ],
)
def test_only_decoupled_decay_is_judged(make: Callable[..., torch.optim.Optimizer], expected: bool) -> None:
    model = Model()
    subject = miswired.stepped(model, make(model.parameters(), lr=1e-3, weight_decay=0.1))
    rows = list(optimizer_rows(subject, Parameters(model, Anatomy(()))))
    assert any(row.quantity == "wiring/decay" for row in rows) == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partial(torch.optim.AdamW, lr=1e-2), False),  # its default, 0.01
        (partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.011), True),
        (partial(torch.optim.Adam, lr=1e-2, weight_decay=0.01, decoupled_weight_decay=True), False),
        (partial(torch.optim.SGD, lr=1e-2, weight_decay=0.01), True),  # its steps may be as small
    ],
)
def test_a_decay_that_takes_little_is_not_judged(
    make: Callable[..., torch.optim.Optimizer], expected: bool
) -> None:
    model = Model()
    assert ("NS711" in found(miswired.stepped(model, make(model.parameters())))) == expected


class Quantised(nn.Module):
    """x W_8ᵀ + (x A) B with a frozen float8 matrix."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        width = miswired.WIDTH
        weight = (torch.randn(outputs, width) / 8).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(width, 2) / 8)
        self.up = nn.Parameter(torch.zeros(2, outputs))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return nn.functional.linear(x_BTC, self.weight.float()) + x_BTC @ self.down @ self.up


def test_weights_of_one_byte_are_measured_and_healthy() -> None:
    model = Model()
    for layer in model.layers:
        assert isinstance(layer, miswired.Block)
        layer.attention.qkv = Quantised(3 * miswired.WIDTH)  # type: ignore[assignment]
    report = normscope.check(miswired.trained(model), steps=0, budget="fast")
    assert not [note for note in report.notes if "could not measure" in note]
    assert {f.severity.value for f in report.findings if f.code.startswith("NS7")} <= {"note"}
    weight = model.get_parameter("layers.1.attention.qkv.weight")
    weight.data[0, 0] = float("nan")
    report = normscope.check(miswired.trained(model), steps=0, budget="fast")
    assert not [note for note in report.notes if "could not measure" in note]
    assert any("layers.1.attention.qkv.weight" in f.sites for f in report.findings)


def test_decay_is_taken_at_the_rate_after_the_warmup() -> None:
    assert found(with_warmup(Model(), 1e-3)) == {"NS711": "note"}


def test_updates_are_tried_at_the_rate_after_the_warmup() -> None:
    subject = with_warmup(Model().to(torch.bfloat16), 0.1)
    assert subject.run is not None
    parameters = Parameters(subject.model, Anatomy(()))
    rows = list(update_rows(subject, parameters, Recipe.of(subject.run)))
    assert Measurements(rows).of("wiring/update-lost")[""] < 0.01


def test_equal_matrices_of_one_block_are_a_note() -> None:
    def twins(model: Model) -> None:
        block = model.layers[3]
        assert isinstance(block, miswired.Block)
        block.attention.gate = nn.Linear(miswired.WIDTH, miswired.WIDTH, bias=False)
        block.attention.gate.weight.copy_(block.attention.out.weight)

    def constant(model: Model) -> None:
        twins(model)
        model.get_parameter("layers.3.attention.out.weight").fill_(0.01)
        model.get_parameter("layers.3.attention.gate.weight").fill_(0.01)

    def codes(change: object) -> list[str]:
        findings = wiring(miswired.trained(miswired.changed(change)))  # type: ignore[arg-type]
        return [f.severity.value for f in findings if f.code == "NS709"]

    assert codes(twins) == ["note"]
    assert codes(constant) == []
