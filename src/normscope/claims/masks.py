"""What a norm's place leaves alone, and what it promises the branch behind it: the mask, mean and variance.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from normscope.claims.form import Case, Evidence, Figure, Plot, Setup, Source, claim, lines_by
from normscope.errors import UsageError
from normscope.nn import SCHEMES, Decoder, ModelConfig, Residual
from normscope.subjects import Subject, load
from normscope.train import TrialConfig, Trials, many_trials

WIDTH, HEADS, DEPTH, VOCAB, TOKENS = 16, 2, 2, 32, 10
POSITIONS = (1, 5, 9)
LEAK = 1e-12
"""Largest relative change of earlier outputs that float64 explains."""


@claim(
    "B14",
    Source("003", "§3", "掩码仍在 Softmax 前把未来得分置 -∞"),
    Source("003", "§3", "不影响“上三角 mask”逻辑"),
    says="Where the norm sits leaves the causal mask alone: no token sees a later one.",
    asks="in every scheme of the catalogue, in train and in eval mode, with live branches, earlier "
    "outputs change by at most 1e-12 of themselves when the token at position 1, 5 or 9 is another",
    parts={"norms": "The same with BatchNorm in the scheme's slots."},
)
def no_leak(setup: Setup) -> Evidence:
    """Every scheme with one token changed, and the adversary whose statistics run over tokens."""
    cases: list[Case] = []
    refused: set[str] = set()
    for seed in setup.seeds:
        for scheme in SCHEMES:
            cases += _leak_cases(decoder(scheme, seed), scheme, seed)
            try:
                model = decoder(scheme, seed, norm="batchnorm")
            except UsageError:
                refused.add(scheme)
            else:
                if has_batch_norm(model):
                    cases += _leak_cases(model, f"{scheme} with BatchNorm", seed, part="norms")
    return Evidence(
        cases,
        Figure.largest("largest relative change of an earlier output", cases),
        notes=[
            f"{len(SCHEMES)} schemes; {len(refused)} refuse BatchNorm, whose statistics run over tokens.",
            f"With BatchNorm in train mode an earlier output moves by up to "
            f"{max(case.value for case in cases if case.part):.2g} of itself.",
            f"GroupNorm is {'refused' if _refuses_group_norm() else 'taken'} in a causal stack.",
        ],
    )


def decoder(scheme: str, seed: int, norm: str | None = None) -> Decoder:
    """A small model in float64 with live branches: all weights moved, as zero starts would hide a leak."""
    torch.manual_seed(seed)
    config = ModelConfig(
        scheme=scheme, depth=DEPTH, width=WIDTH, heads=HEADS, vocab=VOCAB, context=TOKENS, norm=norm
    )
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a slot holds one: some schemes have no norm to replace."""
    return any(type(module).__name__ == "BatchNorm" for module in model.modules())


def _leak_cases(model: Decoder, name: str, seed: int, part: str = "") -> Iterator[Case]:
    ids_T = torch.randint(VOCAB, (TOKENS,))
    for mode in ("eval", "train"):
        change = _leaked(model.train(mode == "train"), ids_T)
        where = f"{name}, {mode} mode"
        yield Case(seed, where, change, change <= LEAK, part)


@torch.no_grad()
def _leaked(model: Decoder, ids_T: Tensor) -> float:
    """Largest relative change of outputs before a position when the token there is another; a row each."""
    ids_BT = ids_T.repeat(len(POSITIONS), 1)
    other_BT = ids_BT.clone()
    for row, position in enumerate(POSITIONS):
        other_BT[row, position] = (ids_T[position] + 1) % VOCAB
    # The same state for both: σReparam's vectors and BatchNorm's averages move in train mode.
    same = copy.deepcopy(model) if model.training else model
    before, after = model(ids_BT).logits, same(other_BT).logits
    scale = float(before.square().mean().sqrt())
    moved = [
        float((after[row, :position] - before[row, :position]).abs().max()) / scale
        for row, position in enumerate(POSITIONS)
    ]
    assert not torch.equal(before[0, 1:], after[0, 1:]), "the change must reach the output"
    return max(moved)


def _refuses_group_norm() -> bool:
    try:
        decoder("pre", 0, norm="groupnorm")
    except UsageError:
        return True
    return False


MODEL = "nn:decoder,init=xavier,depth=6,width=32,heads=2"
STEPS, RATE = 200, 3e-3
AFTER = f"after {STEPS} steps"
NEAR = 0.1
"""How far from 0 and 1 a mean and a variance may be to be "≈ 0" and "≈ 1"."""


@claim(
    "B11",
    Source("003", "§1", "保证传入注意力的张量均值≈0、方差≈1"),
    Source("003", "§2", "子层输入始终单位方差"),
    Source("004", "§8.3", "信号在进入每一层前都是平稳的"),
    says="LayerNorm before the branch gives it an input of mean 0 and variance 1.",
    asks="the mean of what enters each branch is within 0.1 of 0 and its variance within 0.1 of 1: "
    f"6 Pre-LN blocks at the start and after {STEPS} steps of AdamW at {RATE:g}",
    condition="γ and β are as they start (within 1 %)",
    parts={
        "rms": "RMSNorm in its place gives the input unit scale, at the start (mean square 1).",
        "stream": "The stream before that norm has mean 0 and variance 1 by itself.",
    },
)
def branch_inputs(setup: Setup) -> Evidence:
    """Mean and variance at the entry of every branch, before and after training."""
    cases = [case for norm in ("layernorm", "rmsnorm") for case in _input_cases(norm, setup)]
    claimed = [case for case in cases if not case.part]
    plot = Plot(
        "What enters each branch",
        "branch",
        "larger of |mean| and |variance − 1|",
        lines_by(claimed, "branch", "when"),
        levels={"allowed": NEAR},
    )
    return Evidence(
        cases, Figure.largest("farthest a branch's input is from mean 0 or variance 1", claimed), plots=[plot]
    )


def _input_cases(norm: str, setup: Setup) -> Iterator[Case]:
    subjects = [load(f"{MODEL},scheme=pre,norm={norm}", seed=seed, text=setup.text) for seed in setup.seeds]
    trained = train(subjects) if norm == "layernorm" else [subject.model for subject in subjects]
    for seed, subject, model in zip(setup.seeds, subjects, trained, strict=True):
        states = {"at the start": subject.model} | ({} if model is subject.model else {AFTER: model})
        for when, each in states.items():
            yield from _model_cases(each, subject, norm, when, seed)


def _model_cases(model: nn.Module, subject: Subject, norm: str, when: str, seed: int) -> Iterator[Case]:
    for index, (before, after, at_start) in enumerate(entries(model, subject), start=1):
        far = off_unit(after)
        where = f"{when}, branch {index}"
        if norm == "layernorm":
            yield Case(seed, where, far, far <= NEAR, met=at_start, at={"branch": index, "when": when})
            stream = off_unit(before)
            yield Case(seed, where, stream, stream <= NEAR, "stream")
        else:
            scale = abs(float(after.square().mean()) - 1)
            where += f", mean {float(after.mean()):.2g}"
            yield Case(seed, where, scale, scale <= NEAR, "rms")


def off_unit(x: Tensor) -> float:
    """The larger of |mean| and |variance − 1|."""
    return max(abs(float(x.mean())), abs(float(x.var(correction=0)) - 1))


def entries(model: nn.Module, subject: Subject) -> list[tuple[Tensor, Tensor, bool]]:
    """Of each branch in order: the stream before its norm, what enters it, whether γ, β are as they start."""
    found: list[tuple[Tensor, Tensor, bool]] = []

    def keep(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        start = {"weight": 1.0, "bias": 0.0}
        moved = max(float((each - start[name]).abs().max()) for name, each in norm.named_parameters())
        found.append((args[0].double(), output.double(), moved <= 0.01))

    held = [module for module in model.modules() if isinstance(module, Residual)]
    hooks = [residual.norms["branch_in"].register_forward_hook(keep) for residual in held]
    with torch.no_grad():
        subject.forward(model=model)
    for hook in hooks:
        hook.remove()
    return found


def train(subjects: Sequence[Subject], steps: int = STEPS) -> list[nn.Module]:
    """Copies of their models after `steps` steps of AdamW, trained side by side."""
    models = [copy.deepcopy(subject.model) for subject in subjects]
    batches = [subject.batches() for subject in subjects]
    configs = [TrialConfig(lr=RATE, steps=steps, seed=subject.seed) for subject in subjects]
    loss = lambda model, batch: subjects[0].loss(batch, model)  # noqa: E731
    trials: Trials = many_trials(models, batches, loss, configs)
    for _ in range(steps):
        trials.advance()
    for k, model in enumerate(models):
        trials.export(k, model)
    return models
