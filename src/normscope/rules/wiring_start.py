"""NS708 and NS709: the first loss, and values that no initialisation gives."""

from collections.abc import Iterator

from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

OVER_GUESS = 1.0
"""Nats over ln V for a note: logits of deviation √2."""


@rule(
    "NS708",
    summary="The first loss stands far over what guessing gives.",
    why="""A model that knows nothing should say so: a uniform guess costs ln V nats. Logits of deviation
        s that have nothing to do with the targets cost about s²/2 more, and s √(2 ln V) more where s is
        large. The first steps are then spent on taking the confidence back, and their gradients are not
        what the rest of the run has.""",
    threshold=f"""A note from {OVER_GUESS:g} nat over ln V on (logits of deviation √2); a warning from d
        nats over it on a stream of width d, the largest logit of a head whose weights have variance 1
        (Cauchy-Schwarz: such a row has length √d, as has the normalised stream).""",
    source="""Karpathy 2019, "A recipe for training neural networks" (verify the loss at initialisation);
        closed form: E log Σ exp of Gaussian logits, and the random energy model above its transition.""",
    remedy="""Start the head small: nn.init.normal_(head.weight, std=0.02) or d^-½; divide the logits by
        √d where the head is tied to embeddings of deviation 1; check factors on the embeddings (× √d, ×
        1000).""",
    remedies=("small-init",),
)
def first_loss(case: Case) -> Iterator[Hit]:
    loss, guess, most = (
        case.finite(f"wiring/{name}").get("") for name in ("first-loss", "guess", "unit-head")
    )
    if loss is None or guess is None or loss - guess <= OVER_GUESS:
        return
    grave = most is not None and loss - guess > most
    yield Hit(
        note_or_warning(grave),
        (),
        f"The first loss is {figure(loss)} nats; a uniform guess gives {figure(guess)}. Logits of deviation "
        f"{figure((2 * (loss - guess)) ** 0.5, 2)} or more cost that much.",
        case.rows([""], "wiring/first-loss", "wiring/guess", "wiring/unit-head"),
    )


_ODD = {
    "wiring/non-finite-weight": "holds NaN or infinity",
    "wiring/huge-weight": "has entries of {value}, from where an update under 1 rounds to nothing",
    "wiring/denormal-weight": "is subnormal in {percent} % of its entries, as memory never written",
    "wiring/zero-gain": "is a norm's factor of 0 on the only path",
    "wiring/copied-weight": "is a copy of another matrix",
}
_MOST_NAMED = 3


@rule(
    "NS709",
    summary="Weights hold values that no initialisation gives: never initialised, overwritten, or copied.",
    why="""torch.empty gives whatever was in memory: zeros, subnormal numbers or 1e30. A number w of 2/ε
        or more is spaced by 2, so no usual update changes it. A norm whose factor is 0 on the stream
        erases the stream and stops every gradient below it. An infinity in a weight that the batch does
        not reach leaves the loss finite and the run to fail later.""",
    threshold="""A warning for a trained parameter with an entry that is not finite, with entries of 2/ε
        or more (1.7e7 in float32), or with over half of its non-zero entries subnormal (not in float16),
        and for a factor 0 of a norm before a branch, on the stream or at its end. A note for equal
        matrices in one block. A fault that NS506 names is left to it.""",
    source="""IEEE 754 (spacing and subnormal numbers); PyTorch's documentation of torch.empty
        (uninitialised memory); our own reading of the norms' places.""",
    remedy="""Initialise every parameter after torch.empty, after to_empty() and after loading a
        checkpoint with strict=False; set norm factors to 1; draw each matrix anew instead of copying it.""",
)
def garbage_weights(case: Case) -> Iterator[Hit]:
    elsewhere = set(case.finite("precision/non-finite"))
    for quantity, words in _ODD.items():
        found = {site: v for site, v in case.finite(quantity).items() if site not in elsewhere}
        if not found:
            continue
        first, value = next(iter(found.items()))
        names = ", ".join(list(found)[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        told = words.format(value=figure(value), percent=figure(100 * value))
        subject = f"{names}{more}: each" if len(found) > 1 else first
        severity = Severity.NOTE if quantity == "wiring/copied-weight" else Severity.WARNING
        yield Hit(severity, tuple(found), f"{subject} {told}.", case.rows(found, quantity))
