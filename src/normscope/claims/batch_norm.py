"""BatchNorm beside LayerNorm: batch size, training against inference.

Shapes: B batch, T tokens, N samples or tokens of a batch, D width.
"""

import math
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.norm_jacobian import distance
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.nn import NORMS, Decoder, ModelConfig
from normscope.nn.token_norms import BatchNorm
from normscope.subjects import load

WIDTH, EPS = 32, 1e-5
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 40
TEXT_BATCH, TEXT_TOKENS = 32, 256
ROUND_OFF = 1e-12
DISTURBED = 0.1
"""An output that is off by a tenth of itself is disturbed."""


@claim(
    "C4",
    Source("004", "§8.1", "BN对**Batch Size（批次大小）**极其敏感"),
    Source("004", "§3.1", "极大，过小会导致统计不准"),
    Source("004", "§4.1", "适合Batch Size=1"),
    says="BatchNorm depends on the batch size; LayerNorm does not, and works for a batch of one.",
    asks="in batches of 1 to 256 a sample's output moves by at most 1e-12 with LayerNorm, and by more "
    "than 1e-3 of itself with BatchNorm, of what it is in a batch of 512",
    parts={
        "root": Sentence(
            "The error of BatchNorm's statistics falls as one over the root of the batch (±0.1)."
        ),
        "small": Sentence(
            "In a batch of 2 or 4 BatchNorm is very unstable: outputs are off by a tenth or more.",
            "a sample is one vector, not a text of 256 tokens",
        ),
    },
)
def batch_size(setup: Setup) -> Evidence:
    """One sample among others, against its output in a large batch; batches of vectors and of texts."""
    cases: list[Case] = []
    errors: dict[float, list[float]] = {}
    for seed in setup.seeds:
        by_size = _errors_by_size(seed)
        for size, error in by_size.items():
            errors.setdefault(size, []).append(error)
        cases += _size_cases(seed)
        sizes = [size for size in SIZES if size > 1]
        slope = float(np.polyfit(np.log(sizes), np.log([by_size[size] for size in sizes]), 1)[0])
        where = "exponent of the error of the means"
        cases.append(Case(seed=seed, where=where, value=slope, holds=abs(slope + 0.5) <= 0.1, part="root"))
        cases += _small_batch_cases(seed)
    return Evidence(
        cases=cases,
        figure=Figure(
            "exponent of BatchNorm's error in the batch size",
            {case.seed: case.value for case in cases if case.part == "root"},
        ),
        plots=[
            Plot(
                "Error of BatchNorm's means",
                "batch size",
                "RMS error over the deviation",
                [Line.over_seeds("measured", errors)],
                "xy",
            )
        ],
        notes=[f"A batch of one vector: torch's BatchNorm {_batch_of_one()}."],
        of="batches",
    )


def vectors(count: int, generator: torch.Generator) -> Tensor:
    """(N, D), each feature with a mean and a deviation of its own."""
    x_ND = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    return x_ND * torch.linspace(0.5, 2, WIDTH, dtype=torch.float64) + torch.linspace(-1, 1, WIDTH)


def normed(kind: str, x_ND: Tensor) -> Tensor:
    """Our norm of that kind, in train mode, of the samples of a batch."""
    return NORMS[kind](WIDTH, EPS).double().train()(x_ND[None])[0].detach()


def _size_cases(seed: int) -> Iterator[Case]:
    x_ND = vectors(512, torch.Generator().manual_seed(seed))
    large = {kind: normed(kind, x_ND)[0] for kind in ("layernorm", "batchnorm")}
    for size in SIZES:
        for kind, truth in large.items():
            change = distance(normed(kind, x_ND[:size])[0], truth)
            holds = change <= ROUND_OFF if kind == "layernorm" else change > 1e-3
            yield Case(seed=seed, where=f"{kind}, a batch of {size}", value=change, holds=holds)


def _errors_by_size(seed: int) -> dict[int, float]:
    """Batch size → RMS error of the features' means, over their deviations."""
    generator = torch.Generator().manual_seed(1000 + seed)
    deviation, true = torch.linspace(0.5, 2, WIDTH).double(), torch.linspace(-1, 1, WIDTH).double()
    found: dict[int, float] = {}
    for size in SIZES:
        norm = NORMS["batchnorm"](WIDTH, EPS).double().train()
        assert isinstance(norm, BatchNorm)
        squares = []
        for _ in range(REPEATS):
            norm.running_mean.zero_()
            norm(vectors(size, generator)[None])
            mean = norm.running_mean / 0.1  # what one batch leaves there: the momentum's part of its mean
            squares.append(float(((mean - true) / deviation).square().mean()))
        found[size] = math.sqrt(statistics.fmean(squares))
    return found


def _small_batch_cases(seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(2000 + seed)
    x_ND = vectors(4096, generator)
    texts_BTD = text_stream(seed)
    whole = normed("batchnorm", texts_BTD.flatten(0, 1)).view_as(texts_BTD)
    truth_ND = normed("batchnorm", x_ND)
    for size in (2, 4):
        vector = statistics.median(
            distance(normed("batchnorm", x_ND[i : i + size]), truth_ND[i : i + size])
            for i in range(0, 20 * size, size)
        )
        text = statistics.median(
            distance(
                normed("batchnorm", texts_BTD[i : i + size].flatten(0, 1)), whole[i : i + size].flatten(0, 1)
            )
            for i in range(0, TEXT_BATCH, size)
        )
        where = f"a batch of {size}"
        holds = vector >= DISTURBED
        yield Case(seed=seed, where=f"{where} vectors", value=vector, holds=holds, part="small")
        where, holds = f"{where} texts of {TEXT_TOKENS} tokens", text >= DISTURBED
        yield Case(seed=seed, where=where, value=text, holds=holds, met=False, part="small")


def text_stream(seed: int) -> Tensor:
    """(B, T, D): bytes of a text by a random embedding, as the first norm of a model finds them."""
    subject = load(
        "nn:decoder,depth=1,width=32,heads=1", seed=seed, batch_size=TEXT_BATCH, seq_len=TEXT_TOKENS
    )
    assert isinstance(subject.batch, tuple | dict)
    ids_BT = next(iter(subject.batch.values())) if isinstance(subject.batch, dict) else subject.batch[0]
    table_VD = torch.randn(256, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return table_VD[ids_BT]


def _batch_of_one() -> str:
    try:
        nn.BatchNorm1d(WIDTH)(torch.randn(1, WIDTH))
    except ValueError as error:
        return f"refuses it ({error})"
    return "takes it"


@claim(
    "C6",
    Source("004", "§8.1", "LN在训练和推理时的计算逻辑完全一致"),
    Source("004", "§4.1", "训练/推理一致性"),
    Source("004", "§3.1", "推理阶段行为"),
    says="LayerNorm computes the same in training and in inference; BatchNorm does not.",
    asks="between train and eval mode the logits of a decoder without dropout change by nothing at all "
    "with LayerNorm (and RMSNorm), and by more than 1 % with BatchNorm, whose averages have seen 0, 10 or "
    "100 batches",
)
def both_modes(setup: Setup) -> Evidence:
    """The same decoder on the same batch in both modes."""
    cases = [case for seed in setup.seeds for case in _mode_cases(seed)]
    points: dict[float, list[float]] = {}
    for case in cases:
        if case.where.startswith("batchnorm"):
            points.setdefault(float(case.where.split()[-2]), []).append(case.value)
    return Evidence(
        cases=cases,
        figure=Figure(
            "relative change of the logits with BatchNorm, 100 batches seen",
            {case.seed: case.value for case in cases if case.where.endswith(" 100 batches")},
        ),
        plots=[
            Plot(
                "Train mode against eval mode",
                "batches that BatchNorm's averages have seen",
                "relative change of the logits",
                [Line.over_seeds("BatchNorm", points)],
                levels={"LayerNorm": 0.0},
            )
        ],
        of="models",
    )


@torch.no_grad()
def _mode_cases(seed: int) -> Iterator[Case]:
    for norm in ("layernorm", "rmsnorm", "batchnorm"):
        torch.manual_seed(seed)
        model = Decoder(ModelConfig(depth=2, width=WIDTH, heads=2, vocab=64, context=16, norm=norm))
        ids_BT = torch.randint(64, (8, 16))
        seen = 0
        for upto in (0, 10, 100) if norm == "batchnorm" else (0,):
            model.train()
            for _ in range(upto - seen):
                model(torch.randint(64, (8, 16)))
            seen = upto
            change = _between_modes(model, ids_BT)
            where = f"{norm}, {upto} batches"
            yield Case(
                seed=seed,
                where=where,
                value=change,
                holds=change > 0.01 if norm == "batchnorm" else change == 0,
            )


def _between_modes(model: Decoder, ids_BT: Tensor) -> float:
    """Relative change of the logits; eval mode comes first, as train mode moves the averages."""
    inference = model.eval()(ids_BT).logits
    return distance(model.train()(ids_BT).logits, inference)
