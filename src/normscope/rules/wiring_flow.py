"""NS701 to NS703: outputs that see what they must not see, and padding."""

from collections.abc import Iterator

from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, rule

SEEN = 1e-3
"""Change of an output that must stay, over the change of those that may change."""
ALL_NEXT = 0.9
"""Share of targets that are the next input from which the task is next-token prediction."""
PART_NEXT = 0.5
_PERTURBATION = """exact: the inputs are replaced and the outputs compared; our margins: rounding leaves
    relative changes near 1e-6, and a path that carries a thousandth of the information is no rounding"""


@rule(
    "NS701",
    summary="Outputs depend on the later tokens that they are trained to predict.",
    why="""A next-token loss asks for the id at t + 1 from the ids up to t. If the output at t can see the
        id at t + 1, copying it is the easiest solution: the loss falls towards 0 and the model has learnt
        nothing that it can use when it generates, where later ids do not exist.""",
    threshold=f"""An error where at least {ALL_NEXT:g} of the targets are the next input, or a decoder is
        fed with its own labels, and outputs before a place change by over {SEEN:g} of the change behind
        it when the ids from that place on are replaced; a note from {PART_NEXT:g} of the targets on.
        Silent where the targets are not next inputs (encoders, masked language models).""",
    source=f"""Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3 (the causal mask); {_PERTURBATION}.""",
    remedy="""Give every attention the causal mask (is_causal=True, or a mask that is -inf above the
        diagonal), check its polarity, and pad convolutions on the left only. Compare model(ids)[:, :k]
        with model(ids[:, :k]): they must be equal.""",
)
def later_tokens_leak(case: Case) -> Iterator[Hit]:
    share = case.finite("wiring/targets-next").get("", 0.0)
    for quantity in ("wiring/later-tokens", "wiring/own-targets"):
        own = quantity == "wiring/own-targets"
        if not own and share < PART_NEXT:
            continue
        for site, change in case.finite(quantity).items():
            if change <= SEEN:
                continue
            error = own or share >= ALL_NEXT
            what = "the labels that they must predict" if own else "later ids"
            message = (
                f"Outputs change with {what}: by {figure(change)} of the change of the later outputs"
                f"{_first_in(site)}. "
            )
            message += (
                "The labels are their targets."
                if own
                else f"{figure(100 * share)} % of the targets are the next id."
            )
            yield Hit(
                Severity.ERROR if error else Severity.NOTE,
                (site,) if site else (),
                message,
                (*case.rows([site], quantity), *case.rows([""], "wiring/targets-next")),
            )


@rule(
    "NS702",
    summary="The output of one sample depends on the content of another.",
    why="""The samples of a batch are independent examples. A reshape instead of a transpose, a mask or a
        norm over the wrong axis lets them read one another: the training loss then depends on the company
        a sample keeps, and a single sequence, as in generation, meets a model that it was not trained as.
        BatchNorm does this by design in training; in eval mode it uses running statistics. Experts with a
        capacity limit do it too: tokens of one sample take the places of another's.""",
    threshold=f"""An error where other samples' outputs change by over {SEEN:g} of the sample's own change
        when the content of one sample is replaced, in eval mode; a note where the first module that mixes
        is a BatchNorm that keeps no running statistics, or has experts that each get a part of the tokens.
        Not measured where each row of similarities has its own sample as its target (contrastive),
        and where the outputs compare every pair of samples.""",
    source=f"""Karpathy 2019, "A recipe for training neural networks" (dependencies through the batch
        axis); our reading of the outputs: {_PERTURBATION}.""",
    remedy="""Look at the reshapes, transposes and masks of the named module: x.view(B, T, d) of a tensor
        stored as (T, B, d) mixes samples, as does batch_first=False with batches first, and a softmax or
        norm over the batch axis. Compare model(x)[:1] with model(x[:1]).""",
)
def samples_mix(case: Case) -> Iterator[Hit]:
    for row in case.table:
        if row.quantity != "wiring/other-samples" or row.site not in case.finite(row.quantity):
            continue
        change = case.finite(row.quantity)[row.site]
        if change <= SEEN:
            continue
        reason = next((words for kind, words in _BY_DESIGN.items() if f"{kind}; " in row.how), "")
        message = (
            f"Replacing one sample changes the outputs of the others by {figure(change)} of its own"
            f"{_first_in(row.site)}."
        )
        message += reason
        severity = Severity.NOTE if reason else Severity.ERROR
        yield Hit(severity, (row.site,) if row.site else (), message, (row,))


_BY_DESIGN = {
    "batch-norm": " It is a BatchNorm without running statistics, which mixes by design.",
    "experts": " It has experts: a capacity limit, for which samples compete, does this.",
}
"""Words on modules that mix samples on purpose, by their kind in a row's `how`."""


def _first_in(site: str) -> str:
    return f", first in {site}" if site else ""


@rule(
    "NS703",
    summary="Padding counts: its content changes the outputs of real tokens, or it is in the loss.",
    why="""Padding is there to make rows equally long and carries no information. If real tokens attend to
        it, the outputs depend on how long the longest row of the batch is. If it counts in the loss, a
        batch that is half padding spends half its gradient on predicting padding, which is easy, and the
        loss looks better than the model. A softmax over a row with no real token is 0/0.""",
    threshold=f"""A warning where other ids in the padded places change a real token's output by over
        {SEEN:g} of the largest output; where any target that counts is padding; and where a sample of
        nothing but padding gives NaN. Padding is what the batch's mask says, or runs of the padding id; a
        mask whose name tells neither must be runs at the ends of rows, and not what the loss asks for.""",
    source="""Exact: the padded ids are replaced and the outputs compared, and the targets are read from
        the gradient of the loss by the logits; PyTorch's documentation of scaled_dot_product_attention
        (rows that are masked as a whole give NaN).""",
    remedy="""Pass the mask to every attention and check its polarity (key_padding_mask is True at
        padding, attention_mask of transformers is 1 at real tokens); set the labels of padding to -100 or
        give ignore_index; drop empty rows.""",
)
def padding_counts(case: Case) -> Iterator[Hit]:
    change = case.finite("wiring/padding-content").get("", 0.0)
    share = case.finite("wiring/padding-in-loss").get("", 0.0)
    padded = figure(100 * case.finite("wiring/padded").get("", 0.0), 2)
    found = {
        "padding-content": (
            change > SEEN,
            f"Other ids in the padded places ({padded} % of the batch) change real tokens' outputs by "
            f"{figure(change)} of the largest output.",
        ),
        "padding-in-loss": (share > 0, f"{figure(100 * share)} % of the targets that count are padding."),
        "masked-row": (
            case.finite("wiring/masked-row").get("") == 1.0,
            "A sample of nothing but padding gives outputs that are not finite.",
        ),
    }
    for name, (is_wrong, message) in found.items():
        if is_wrong:
            yield Hit(Severity.WARNING, (), message, case.rows([""], f"wiring/{name}", "wiring/padded"))
