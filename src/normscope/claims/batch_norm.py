"""BatchNorm beside LayerNorm: batch size, padding, training against inference, and a line of code.

Shapes: B batch, T tokens, N samples or tokens of a batch, D width.
"""

import math
import statistics
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.look import Look
from normscope.claims.norm_jacobian import distance
from normscope.claims.sources import Source
from normscope.nn import NORMS, Decoder, Encoder, ModelConfig
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
    hypothesis="in batches of 1 to 256 a sample's output moves by at most 1e-12 with LayerNorm, and by more "
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
def batch_size(look: Look) -> Evidence:
    """One sample among others, against its output in a large batch; batches of vectors and of texts."""
    cases: list[Case] = []
    errors: dict[float, list[float]] = {}
    for seed in look.seeds:
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
    "C5",
    Source("004", "§8.1", "BN处理变长序列非常麻烦"),
    Source("004", "§3.1", "填充（Padding）差异巨大"),
    Source("004", "§4.1", "弱 (通常需要Padding)"),
    says="Padding disturbs BatchNorm.",
    hypothesis="the outputs of the real tokens of a text change by a tenth or more when the batch is "
    "padded to 1.25 to 4 times its length",
    condition="the norm is not told which tokens are padding",
    parts={"ln": Sentence("Padding does nothing to LayerNorm (at most 1e-12, through an encoder).")},
)
def padding(look: Look) -> Evidence:
    """The same texts with more and less padding: torch's BatchNorm, ours with a mask, an encoder."""
    cases = [case for seed in look.seeds for case in (*_padding_cases(seed), *_encoder_cases(seed))]
    claimed = [case for case in cases if not case.part]
    points: dict[str, dict[float, list[float]]] = {}
    for case in claimed:
        name, _, times = case.where.partition(", padded × ")
        points.setdefault(name, {}).setdefault(float(times), []).append(max(case.value, 1e-16))
    return Evidence(
        cases=cases,
        figure=Figure.largest("largest relative change of the real tokens' outputs", claimed),
        plots=[
            Plot(
                "What padding does to the real tokens",
                "length of the batch over that of the texts",
                "relative change of their outputs",
                [Line.over_seeds(name, each) for name, each in points.items()],
                "y",
                {"disturbed": DISTURBED},
            )
        ],
        of="batches",
    )


def _padding_cases(seed: int) -> Iterator[Case]:
    texts_BTD = text_stream(seed)[:8]
    truth = normed("batchnorm", texts_BTD.flatten(0, 1)).view_as(texts_BTD)
    pad_D = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    for times in (1.25, 1.5, 2.0, 4.0):
        more = round((times - 1) * TEXT_TOKENS)
        x_BTD = torch.cat((texts_BTD, pad_D.expand(8, more, WIDTH)), 1)
        real_BT = torch.arange(x_BTD.shape[1]).expand(8, -1) < TEXT_TOKENS
        theirs = nn.BatchNorm1d(WIDTH, EPS).double()(x_BTD.transpose(1, 2)).transpose(1, 2)
        ours = NORMS["batchnorm"](WIDTH, EPS).double().train()(x_BTD, real_BT)
        for name, y_BTD in (("torch's BatchNorm", theirs), ("ours, told", ours)):
            change = distance(y_BTD.detach()[:, :TEXT_TOKENS], truth)
            where, told = f"{name}, padded × {times:g}", name == "ours, told"
            yield Case(seed=seed, where=where, value=change, holds=change >= DISTURBED, met=not told)


@torch.no_grad()
def _encoder_cases(seed: int) -> Iterator[Case]:
    torch.manual_seed(seed)
    model = Encoder(ModelConfig(depth=2, width=WIDTH, heads=2, vocab=64, context=64)).double()
    ids_BT = torch.randint(64, (4, 16))
    truth = model(ids_BT).logits
    for more in (4, 16, 48):
        padded_BT = torch.cat((ids_BT, torch.zeros(4, more, dtype=ids_BT.dtype)), 1)
        mask_BT = (torch.arange(16 + more) < 16).expand(4, -1).long()
        change = distance(model(padded_BT, attention_mask=mask_BT).logits[:, :16], truth)
        where = f"an encoder with LayerNorm, {more} of padding"
        yield Case(seed=seed, where=where, value=change, holds=change <= ROUND_OFF, part="ln")


@claim(
    "C6",
    Source("004", "§8.1", "LN在训练和推理时的计算逻辑完全一致"),
    Source("004", "§4.1", "训练/推理一致性"),
    Source("004", "§3.1", "推理阶段行为"),
    says="LayerNorm computes the same in training and in inference; BatchNorm does not.",
    hypothesis="between train and eval mode the logits of a decoder without dropout change by nothing at all "
    "with LayerNorm (and RMSNorm), and by more than 1 % with BatchNorm, whose averages have seen 0, 10 or "
    "100 batches",
)
def both_modes(look: Look) -> Evidence:
    """The same decoder on the same batch in both modes."""
    cases = [case for seed in look.seeds for case in _mode_cases(seed)]
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


@claim(
    "C36",
    Source("004", "§3.3", "output_bn = bn(x.view(2, 512, 10)).view(2, 10, 512)"),
    says="The line printed for BatchNorm normalises each feature of [batch, sequence, features].",
    hypothesis="its output is that of BatchNorm over the features (x transposed, not viewed) within 1e-6 of "
    "itself; features alike, features of different scale, positions of different scale",
    parts={"mean": Sentence("Each feature of its output has mean 0 over batch and positions (within 1e-6).")},
)
def viewed(look: Look) -> Evidence:
    """The line as printed beside the transposed one, and what each of its channels is made of."""
    cases = [case for seed in look.seeds for case in _view_cases(seed)]
    features, positions = _mixed()
    return Evidence(
        cases=cases,
        figure=Figure.largest("largest relative distance from BatchNorm over features", cases),
        notes=[
            f"A channel of the view holds {features} different features at {positions} position(s) of a "
            "sequence, not one feature at 10: view is not a transpose."
        ],
        of="inputs",
    )


def _view_cases(seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    x_BTD = torch.randn(2, 10, 512, dtype=torch.float64, generator=generator)
    inputs = {
        "N(0, 1)": x_BTD,
        "features of scale 0.1 to 10": x_BTD * torch.logspace(-1, 1, 512),
        "positions of scale 0.1 to 10": x_BTD * torch.logspace(-1, 1, 10)[:, None],
    }
    for name, x in inputs.items():
        printed = nn.BatchNorm1d(512).double()(x.view(2, 512, 10)).view(2, 10, 512).detach()
        truth = NORMS["batchnorm"](512, EPS).double().train()(x).detach()
        far, mean = distance(printed, truth), float(printed.mean((0, 1)).abs().max())
        yield Case(seed=seed, where=name, value=far, holds=far <= 1e-6)
        yield Case(seed=seed, where=f"{name}, largest mean", value=mean, holds=mean <= 1e-6, part="mean")


def _mixed() -> tuple[int, int]:
    """Most features, and most positions, that one channel of the view is made of."""
    feature = torch.arange(512).expand(1, 10, 512).reshape(512, 10)
    position = torch.arange(10)[:, None].expand(10, 512).reshape(512, 10)
    return tuple(max(len(row.unique()) for row in each) for each in (feature, position))  # type: ignore[return-value]
