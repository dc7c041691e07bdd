"""BatchNorm beside LayerNorm: batch size, training against inference, padding, and a printed line.

Shapes: B batch, T tokens, N samples or tokens of a batch, D width.
"""

import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normscope.claims.at_start import slope
from normscope.claims.experiments import distance, gaussian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_along, lines_by, plots
from normscope.nn import NORMS, Decoder, Encoder, ModelConfig
from normscope.nn.token_norms import BatchNorm
from normscope.subjects import load

WIDTH, EPS = 32, 1e-5
SIZES, REPEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256), 40
TEXT_BATCH, TEXT_TOKENS = 32, 256
ROUND_OFF = 1e-12
DISTURBED = 0.1
"""An output that is off by a tenth of itself is disturbed."""


@claim("C4")
def batch_size(setup: Setup) -> Evidence:
    """One sample among others, against its output in a large batch; batches of vectors and of texts."""
    cases = setup.cases(_size_cases, _small_batch_cases)
    errors = {seed: [_error_of_means(size, seed) for size in SIZES] for seed in setup.seeds}
    exponents = {seed: slope(SIZES[1:], found[1:]) for seed, found in errors.items()}
    where = "exponent of the error of the means"
    cases += [Case(seed, where, p, abs(p + 0.5) <= 0.1, "root") for seed, p in exponents.items()]
    return Evidence(
        cases,
        Figure("exponent of BatchNorm's error in the batch size", exponents),
        plots=plots("C4", lines_along(SIZES, {"measured": errors})),
        notes=[f"A batch of one vector: torch's BatchNorm {_batch_of_one()}."],
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
            yield Case(seed, f"{kind}, a batch of {size}", change, holds)


def _error_of_means(size: int, seed: int) -> float:
    """RMS error of the features' means in batches of `size`, over their deviations."""
    generator = torch.Generator().manual_seed(1000 * size + seed)
    deviation, true = torch.linspace(0.5, 2, WIDTH).double(), torch.linspace(-1, 1, WIDTH).double()
    norm, squares = NORMS["batchnorm"](WIDTH, EPS).double().train(), []
    assert isinstance(norm, BatchNorm)
    for _ in range(REPEATS):
        norm.running_mean.zero_()
        norm(vectors(size, generator)[None])
        mean = norm.running_mean / 0.1  # what one batch leaves there: the momentum's part of its mean
        squares.append(float(((mean - true) / deviation).square().mean()))
    return math.sqrt(statistics.fmean(squares))


def _small_batch_cases(seed: int) -> Iterator[Case]:
    x_ND, texts_BTD = vectors(4096, torch.Generator().manual_seed(2000 + seed)), text_stream(seed)
    for part, samples in (("vectors", x_ND[:, None]), ("texts", texts_BTD)):
        whole = normed("batchnorm", samples.flatten(0, 1)).view_as(samples)
        for size in (2, 4):
            parts = [slice(i, i + size) for i in range(0, TEXT_BATCH, size)]
            outputs = [normed("batchnorm", samples[its].flatten(0, 1)) for its in parts]
            truths = [whole[its].flatten(0, 1) for its in parts]
            off = statistics.median(map(distance, outputs, truths))
            yield Case(seed, f"a batch of {size} {part}", off, off >= DISTURBED, part)


def text_stream(seed: int) -> Tensor:
    """(B, T, D): bytes of a text by a random embedding, as the first norm of a model finds them."""
    spec = "nn:decoder,depth=1,width=32,heads=1"
    batch = load(spec, seed=seed, batch_size=TEXT_BATCH, seq_len=TEXT_TOKENS).batch
    assert isinstance(batch, dict)
    return gaussian(seed, 256, WIDTH)[batch["ids"]]


def _batch_of_one() -> str:
    try:
        nn.BatchNorm1d(WIDTH)(torch.randn(1, WIDTH))
        return "takes it"
    except ValueError as error:
        return f"refuses it ({error})"


@claim("C6")
def both_modes(setup: Setup) -> Evidence:
    """The same decoder on the same batch in both modes."""
    cases = setup.cases(_mode_cases)
    batch = [case for case in cases if case.at["norm"] == "batchnorm"]
    lines = lines_by(batch, "batches", "norm")
    seen_100 = [case for case in batch if case.at["batches"] == 100]
    what = "relative change of the logits with BatchNorm, 100 batches seen"
    return Evidence(cases, Figure.largest(what, seen_100), plots=plots("C6", lines))


@torch.no_grad()
def _mode_cases(seed: int) -> Iterator[Case]:
    for norm in ("layernorm", "rmsnorm", "batchnorm"):
        torch.manual_seed(seed)
        model = Decoder(ModelConfig(depth=2, width=WIDTH, heads=2, vocab=64, context=16, norm=norm))
        ids_BT, seen = torch.randint(64, (8, 16)), 0
        for upto in (0, 10, 100) if norm == "batchnorm" else (0,):
            model.train()
            for _ in range(upto - seen):
                model(torch.randint(64, (8, 16)))
            seen = upto
            inference = model.eval()(ids_BT).logits  # first, as train mode moves the averages
            change = distance(model.train()(ids_BT).logits, inference)
            holds = change > 0.01 if norm == "batchnorm" else change == 0
            yield Case(seed, "", change, holds, at={"norm": norm, "batches": upto})


@claim("C5")
def padding(setup: Setup) -> Evidence:
    """The same texts with more and less padding: torch's BatchNorm, ours with a mask, an encoder."""
    cases = setup.cases(_padding_cases, _encoder_cases)
    lines = lines_by((case for case in cases if case.part != "ln"), "padded ×", "norm")
    figure = Figure.largest("largest relative change of the real tokens' outputs", cases)
    return Evidence(cases, figure, plots=plots("C5", lines))


def _padding_cases(seed: int) -> Iterator[Case]:
    texts_BTD = text_stream(seed)[:8]
    truth = normed("batchnorm", texts_BTD.flatten(0, 1)).view_as(texts_BTD)
    pad_D = gaussian(seed + 1, WIDTH)
    for times in (1.25, 1.5, 2.0, 4.0):
        more = round((times - 1) * TEXT_TOKENS)
        x_BTD = torch.cat((texts_BTD, pad_D.expand(8, more, WIDTH)), 1)
        real_BT = torch.arange(x_BTD.shape[1]).expand(8, -1) < TEXT_TOKENS
        theirs = nn.BatchNorm1d(WIDTH, EPS).double()(x_BTD.transpose(1, 2)).transpose(1, 2)
        ours = NORMS["batchnorm"](WIDTH, EPS).double().train()(x_BTD, real_BT)
        for name, part, y_BTD in (("torch's BatchNorm", "", theirs), ("ours, told", "told", ours)):
            change = distance(y_BTD.detach()[:, :TEXT_TOKENS], truth)
            yield Case.at_least(seed, "", change, DISTURBED, part, at={"norm": name, "padded ×": times})


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
        yield Case(seed, where, change, change <= ROUND_OFF, "ln")


@claim("C36")
def viewed(setup: Setup) -> Evidence:
    """The line as printed beside the transposed one, and what each of its channels is made of."""
    cases = setup.cases(_view_cases)
    feature = torch.arange(512).expand(1, 10, 512).reshape(512, 10)  # as a channel of the view holds them
    most = max(len(row.unique()) for row in feature)
    return Evidence(
        cases,
        Figure.largest("largest relative distance from BatchNorm over features", cases),
        notes=[f"A channel of the view holds up to {most} features, not one: view is not a transpose."],
    )


def _view_cases(seed: int) -> Iterator[Case]:
    x_BTD = gaussian(seed, 2, 10, 512)
    inputs = {
        "N(0, 1)": x_BTD,
        "features of scale 0.1 to 10": x_BTD * torch.logspace(-1, 1, 512),
        "positions of scale 0.1 to 10": x_BTD * torch.logspace(-1, 1, 10)[:, None],
    }
    for name, x in inputs.items():
        printed = nn.BatchNorm1d(512).double()(x.view(2, 512, 10)).view(2, 10, 512).detach()
        truth = NORMS["batchnorm"](512, EPS).double().train()(x).detach()
        far, mean = distance(printed, truth), float(printed.mean((0, 1)).abs().max())
        yield Case(seed, name, far, far <= 1e-6)
        yield Case(seed, f"{name}, largest mean", mean, mean <= 1e-6, "mean")
