"""Predicted peaks are those of the CPU's allocator, and of PyTorch's own tracker."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional

from benchmarks.plan import Case, measured_peak, planned, subject_of
from normscope.planning import Held, plan
from normscope.planning.making import with_loss
from normscope.planning.stand_in import fake_stand_in
from normscope.planning.step import Step, makes
from normscope.subjects import load, make_subject

_LLAMA = "hf:llama,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
CASES = (
    Case("nn:decoder,depth=2,width=64,heads=2", "adamw", 0.8),
    Case("nn:decoder,scheme=post,depth=2,width=64,heads=2,dropout=0.1", "sgd", 0.7),
    Case("nn:encoder-decoder,depth=2,width=64,heads=2", "muon", 0.8),
    Case("nn:decoder,depth=2,width=64,heads=2", "adam", 0.8, precision="bfloat16"),
    Case("hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=300", "adafactor", 0.7),
    Case(f"{_LLAMA},intermediate_size=128,vocab_size=300", "adamw", 0.75),
    Case("torch.nn.TransformerEncoder", "adamw", 0.8, 4, 64),
)
WITHIN = 0.03


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model.partition(',')[0]}-{case.optimizer}")
def test_the_predicted_peak_is_the_allocators(case: Case) -> None:
    options = {"optimizer": case.optimizer, "precision": case.precision}
    as_is = planned(case, None, options)
    assert as_is.tensors == "fake"
    assert case.share is not None
    limit = int(case.share * as_is.before.peak)
    made = planned(case, limit, options)
    assert made.peak <= limit
    assert made.recompute
    subject = subject_of(case)
    for paths, predicted in (((), as_is.peak), (made.recompute, made.peak)):
        seen = measured_peak(subject, case, paths)
        assert predicted == pytest.approx(seen, rel=WITHIN)
    assert made.added_flops > 0


def test_a_peak_in_the_optimizers_step_is_the_allocators() -> None:
    """Fake weights are stepped by the fused code that steps real ones: the other takes temporary memory."""
    case = Case("nn:decoder,depth=2,width=256,heads=2", batch_size=1, seq_len=8)
    made = planned(case, None, {})
    assert made.peak == pytest.approx(measured_peak(subject_of(case), case, ()), rel=0.005)


class Scan(nn.Module):
    """A recurrence over the tokens: the gradient of each slice is as large as the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.values = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        gates, values = self.gates(x_BTD).sigmoid(), self.values(x_BTD)
        state = torch.zeros_like(values[:, 0])
        states = []
        for token in range(x_BTD.shape[1]):
            state = gates[:, token] * state + values[:, token]
            states.append(state)
        return torch.stack(states, 1)


class Picks(nn.Module):
    """Indexing, the largest values and gathering, whose gradients are written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("order", torch.arange(64).flip(0))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for each in self.maps:
            x_BD = each(x_BD)[self.order] * x_BD.topk(64, -1).values
            x_BD = x_BD.gather(1, self.order.expand_as(x_BD))
        return x_BD


class Views(nn.Module):
    """Three maps of one state: each gradient of the state is a view, so that they are not added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.maps = nn.Linear(8, 512), nn.ModuleList(nn.Linear(512, 8) for _ in range(3))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        state = self.widen(x_BTD)
        return torch.stack([each(state) for each in self.maps]).sum(0)


class Tied(nn.Module):
    """A weight with two gradients, of which the first is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4096, 64))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.embedding(ids_BT, self.weight).sin(), self.weight)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Scan(), torch.randn(16, 48, 64)),
        (Picks(), torch.randn(64, 64)),
        (Views(), torch.randn(16, 64, 8)),
        (Tied(), torch.arange(64).reshape(4, 16)),
    ],
    ids=["slices", "picks", "views", "tied"],
)
def test_gradients_are_added_in_place_as_without_a_mode(model: nn.Module, batch: torch.Tensor) -> None:
    subject = with_loss(make_subject(model, batch))
    case = Case(type(model).__name__, "sgd")
    predicted = plan(subject, optimizer="sgd").peak
    assert predicted == pytest.approx(measured_peak(subject, case, ()), rel=0.005)


def test_a_mixture_of_experts_in_float32_is_followed_without_values() -> None:
    case = Case(
        "hf:mixtral,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,"
        "intermediate_size=128,vocab_size=300,num_local_experts=4"
    )
    made = planned(case, None, {})
    assert made.tensors == "fake"
    assert made.peak == pytest.approx(measured_peak(subject_of(case), case, ()), rel=WITHIN)


_BART = (
    "hf:bart,d_model=64,encoder_layers=2,decoder_layers=2,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,vocab_size=300"
)


def test_a_mask_of_ones_is_left_out_as_for_real_tensors() -> None:
    """BART gives its decoder a mask of ones, which transformers drops where it can read its values."""
    case = Case(_BART, "sgd", batch_size=2, seq_len=256)
    made = planned(case, None, {"optimizer": "sgd"})
    assert made.tensors == "fake"
    assert made.peak == pytest.approx(measured_peak(subject_of(case), case, ()), rel=0.005)


@pytest.mark.parametrize("hidden", [0, 3])
def test_a_mask_in_the_batch_is_left_out_only_if_it_is_of_ones(hidden: int) -> None:
    subject = load(_BART, batch_size=2, seq_len=256)
    assert isinstance(subject.batch, dict)
    mask = torch.ones_like(subject.batch["input_ids"])
    mask[:, :hidden] = 0
    subject = dataclasses.replace(subject, batch={**subject.batch, "decoder_attention_mask": mask})
    predicted = plan(subject, optimizer="sgd").peak
    assert predicted == pytest.approx(measured_peak(subject, Case("bart", "sgd"), ()), rel=0.005)


def test_the_copies_that_a_convolution_makes_are_counted() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 64, 3), nn.ReLU(), nn.Conv1d(64, 64, 3), nn.ReLU(), nn.Conv1d(64, 4, 3)
    )
    subject = make_subject(model, torch.randn(4, 4, 2048))
    predicted = plan(subject, optimizer="sgd").peak
    assert predicted == pytest.approx(measured_peak(subject, Case("convolutions", "sgd"), ()), rel=0.05)


def test_the_peak_is_that_of_pytorchs_tracker() -> None:
    subject = load("nn:decoder,depth=3,width=64,heads=2", fake=True)
    with fake_stand_in(subject):
        step = Step(subject, makes("adamw"), "float32")
        step.record(())
        ours = step.measure().peak
        tracker = MemTracker()
        tracker.track_external(subject.model, *step.optimizers, *subject.batch.values())  # type: ignore[union-attr]
        with tracker:
            subject.loss().backward()
            step.optimizers[0].step()
    (theirs,) = (snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "muon", "adafactor"])
def test_the_state_is_that_of_a_real_optimizer(optimizer: str) -> None:
    spec = "nn:decoder,depth=2,width=32,heads=2"
    subject = load(spec)
    (*made,) = makes(optimizer)(subject.model)
    subject.loss().backward()
    for each in made:
        each.step()
    values = [v for each in made for state in each.state.values() for v in state.values()]
    held = sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
    stays = plan(spec, optimizer=optimizer).before.stays
    assert stays[Held.OPTIMIZER] == held
    assert stays[Held.PARAMETERS] == sum(p.numel() * p.element_size() for p in subject.model.parameters())


def test_tied_weights_count_once() -> None:
    tied, untied = (
        plan(f"nn:decoder,depth=1,width=32,heads=2,vocab=999,tie={tie}") for tie in ("true", "false")
    )
    difference = untied.before.stays[Held.PARAMETERS] - tied.before.stays[Held.PARAMETERS]
    assert difference == 999 * 32 * 4


def test_half_precision_halves_the_activations() -> None:
    whole, half = (plan("nn:decoder,depth=2,width=64,heads=2", dtype=d) for d in (None, torch.bfloat16))
    assert half.before.stays[Held.PARAMETERS] == whole.before.stays[Held.PARAMETERS] / 2
    assert sum(r.saved for r in half.rows) < 0.7 * sum(r.saved for r in whole.rows)


def test_a_model_of_any_size_is_planned_without_memory_for_it() -> None:
    spec = "nn:decoder,depth=8,width=16384,heads=16"
    as_is = plan(spec, batch_size=16, seq_len=2048)
    assert as_is.before.stays[Held.PARAMETERS] > 90 * 2**30
    made = plan(spec, as_is.peak - 4 * 2**30, batch_size=16, seq_len=2048)
    assert made.recompute
    assert made.peak <= as_is.peak - 4 * 2**30


class Asks(nn.Module):
    """A model whose forward reads a value, which fake tensors lack."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = x_BD + block(x_BD).relu() if float(x_BD.detach().abs().sum()) > 0 else x_BD
        return x_BD


def test_a_model_that_reads_values_is_run_and_left_as_it_was() -> None:
    model = Asks()
    before = copy.deepcopy(model.state_dict())
    made = plan(model, batch=torch.randn(64, 16), optimizer="sgd")
    assert made.tensors == "real"
    assert any("fake tensors cannot run this model" in note for note in made.notes)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
