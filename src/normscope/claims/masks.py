"""The causal mask under every placement, and the mean and variance of what enters a Pre-LN branch.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.claims.catalogue import SCHEMES
from normscope.claims.experiments import calls_of, of_part, values
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_by, plots
from normscope.claims.training import train_together
from normscope.errors import UsageError
from normscope.nn import Decoder, ModelConfig, Residual
from normscope.nn.token_norms import BatchNorm
from normscope.subjects import Subject, load
from normscope.train import Recipe

VOCAB, TOKENS = 32, 10
POSITIONS = (1, 5, 9)
LEAK = 1e-12
"""Largest relative change of earlier outputs that float64 explains."""


@claim("B14")
def no_leak(setup: Setup) -> Evidence:
    """Every scheme with one token changed, and the adversary whose statistics run over tokens."""
    cases: list[Case] = []
    refused: set[str] = set()
    for seed in setup.seeds:
        for scheme in SCHEMES:
            cases += _leak_cases(decoder(scheme, seed), scheme, seed)
            model = _built(scheme, seed, "batchnorm")
            if model is None:
                refused.add(scheme)
            elif any(isinstance(module, BatchNorm) for module in model.modules()):  # some have no norm
                cases += _leak_cases(model, f"{scheme} with BatchNorm", seed, part="norms")
    return Evidence(
        cases,
        Figure.largest("largest relative change of an earlier output", cases),
        notes=[
            f"{len(SCHEMES)} schemes; {len(refused)} refuse BatchNorm, whose statistics run over tokens.",
            "With BatchNorm in train mode an earlier output moves by up to "
            f"{max(values(cases, 'norms')):.2g} of itself.",
            f"GroupNorm is {'taken' if _built('pre', 0, 'groupnorm') else 'refused'} in a causal stack.",
        ],
    )


def decoder(scheme: str, seed: int, norm: str | None = None) -> Decoder:
    """A small model in float64 with live branches: all weights moved, as zero starts would hide a leak."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"depth": 2, "width": 16, "heads": 2, "vocab": VOCAB, "context": TOKENS}
    model = Decoder(ModelConfig(scheme=scheme, norm=norm, **sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _built(scheme: str, seed: int, norm: str) -> Decoder | None:
    try:
        return decoder(scheme, seed, norm)
    except UsageError:
        return None


def _leak_cases(model: Decoder, name: str, seed: int, part: str = "") -> Iterator[Case]:
    ids_T = torch.randint(VOCAB, (TOKENS,))
    for mode in ("eval", "train"):
        where = f"{name}, {mode} mode"
        yield Case.at_most(seed, where, _leaked(model.train(mode == "train"), ids_T), LEAK, part)


@torch.no_grad()
def _leaked(model: Decoder, ids_T: Tensor) -> float:
    """Largest relative change of outputs before a position when the token there is another; a row each."""
    rows = list(enumerate(POSITIONS))
    ids_BT, other_BT = ids_T.repeat(2, len(rows), 1).unbind()
    for row, position in rows:
        other_BT[row, position] = (ids_T[position] + 1) % VOCAB
    # The same state for both: σReparam's vectors and BatchNorm's averages move in train mode.
    same = copy.deepcopy(model) if model.training else model
    before, after = model(ids_BT).logits, same(other_BT).logits
    assert not torch.equal(before[0, 1:], after[0, 1:]), "the change must reach the output"
    moved = max(float((after - before)[row, :position].abs().max()) for row, position in rows)
    return moved / float(before.square().mean().sqrt())


MODEL = "nn:decoder,init=xavier,depth=6,width=32,heads=2"
STEPS, RATE = 200, 3e-3
AFTER = f"after {STEPS} steps"
NEAR = 0.1
"""Largest distance from 0 and 1 of a mean that is "≈ 0" and a variance that is "≈ 1"."""


@claim("B11")
def branch_inputs(setup: Setup) -> Evidence:
    """Mean and variance at the entry of every branch, before and after training."""
    cases = [case for norm in ("layernorm", "rmsnorm") for case in _input_cases(norm, setup)]
    figure = Figure.largest("farthest a branch's input is from mean 0 or variance 1", cases)
    return Evidence(cases, figure, plots=plots("B11", lines_by(of_part(cases), "branch", "when")))


def _input_cases(norm: str, setup: Setup) -> Iterator[Case]:
    subjects = [load(f"{MODEL},scheme=pre,norm={norm}", seed=seed, text=setup.text) for seed in setup.seeds]
    trained = train(subjects, STEPS) if norm == "layernorm" else [subject.model for subject in subjects]
    for seed, subject, model in zip(setup.seeds, subjects, trained, strict=True):
        states = {"at the start": subject.model} | ({} if model is subject.model else {AFTER: model})
        for when, each in states.items():
            yield from _model_cases(each, subject, norm, when, seed)


def _model_cases(model: nn.Module, subject: Subject, norm: str, when: str, seed: int) -> Iterator[Case]:
    for index, (before, after, at_start) in enumerate(entries(model, subject), start=1):
        at: dict[str, float | str] = {"when": when, "branch": index}
        if norm == "layernorm":
            yield Case.at_most(seed, "", off_unit(after), NEAR, met=at_start, at=at)
            yield Case.at_most(seed, "", off_unit(before), NEAR, "stream", at=at)
        else:
            where = f"{when}, branch {index}, mean {float(after.mean()):.2g}"
            yield Case.at_most(seed, where, abs(float(after.square().mean()) - 1), NEAR, "rms")


def off_unit(x: Tensor) -> float:
    """The larger of |mean| and |variance − 1|."""
    return max(abs(float(x.mean())), abs(float(x.var(correction=0)) - 1))


def entries(model: nn.Module, subject: Subject) -> list[tuple[Tensor, Tensor, bool]]:
    """Stream before the norm of each branch, the norm's output, and whether γ and β are as they start."""
    norms = [module.norms["branch_in"] for module in model.modules() if isinstance(module, Residual)]
    with torch.no_grad(), calls_of(norms) as calls:
        subject.forward(model=model)
    return [(before.double(), after.double(), _is_at_start(norm)) for norm, before, after in calls]


def _is_at_start(norm: nn.Module) -> bool:
    start = {"weight": 1.0, "bias": 0.0}
    return all(bool(((each - start[name]).abs() <= 0.01).all()) for name, each in norm.named_parameters())


def train(subjects: Sequence[Subject], steps: int) -> list[nn.Module]:
    """Copies of their models after `steps` steps of AdamW, trained side by side."""
    models = [copy.deepcopy(subject.model) for subject in subjects]
    batches = [subject.batches() for subject in subjects]
    configs = [Recipe(lr=RATE, steps=steps, seed=subject.seed) for subject in subjects]
    train_together(models, batches, lambda model, batch: subjects[0].loss(batch, model), configs)
    return models
