"""BatchNorm of texts: padding, and a line of code.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Iterator

import torch
from torch import nn

from normscope.claims.batch_norm import DISTURBED, EPS, ROUND_OFF, TEXT_TOKENS, WIDTH, normed, text_stream
from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.norm_jacobian import distance
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.nn import NORMS, Encoder, ModelConfig


@claim(
    "C5",
    Source("004", "§8.1", "BN处理变长序列非常麻烦"),
    Source("004", "§3.1", "填充（Padding）差异巨大"),
    Source("004", "§4.1", "弱 (通常需要Padding)"),
    says="Padding disturbs BatchNorm.",
    asks="the outputs of the real tokens of a text change by a tenth or more when the batch is "
    "padded to 1.25 to 4 times its length",
    condition="the norm is not told which tokens are padding",
    parts={"ln": Sentence("Padding does nothing to LayerNorm (at most 1e-12, through an encoder).")},
)
def padding(setup: Setup) -> Evidence:
    """The same texts with more and less padding: torch's BatchNorm, ours with a mask, an encoder."""
    cases = [case for seed in setup.seeds for case in (*_padding_cases(seed), *_encoder_cases(seed))]
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
    "C36",
    Source("004", "§3.3", "output_bn = bn(x.view(2, 512, 10)).view(2, 10, 512)"),
    says="The line printed for BatchNorm normalises each feature of [batch, sequence, features].",
    asks="its output is that of BatchNorm over the features (x transposed, not viewed) within 1e-6 of "
    "itself; features alike, features of different scale, positions of different scale",
    parts={"mean": Sentence("Each feature of its output has mean 0 over batch and positions (within 1e-6).")},
)
def viewed(setup: Setup) -> Evidence:
    """The line as printed beside the transposed one, and what each of its channels is made of."""
    cases = [case for seed in setup.seeds for case in _view_cases(seed)]
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
