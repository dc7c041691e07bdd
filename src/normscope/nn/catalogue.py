"""Descriptions of the schemes for `normscope schemes` and docs/schemes.md, made from `SCHEMES` alone.

The numbers of a rule are computed by the rule, for a stack of `SAMPLE_DEPTH` blocks.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from normscope.nn.placement import Kind, Placement, Rule, Slot, Where
from normscope.nn.scheme import Initialisation, Inside, Scheme
from normscope.nn.schemes import SCHEMES, scheme_named
from normscope.nn.weights import WEIGHTS

SAMPLE_DEPTH = 12
KINDS: tuple[Kind, ...] = ("attention", "feed-forward")
SUBLAYERS = [
    Where(block, SAMPLE_DEPTH, kind, index)
    for block in range(1, SAMPLE_DEPTH + 1)
    for index, kind in enumerate(KINDS)
]
"""Every sublayer of the sample stack, in order."""
INSIDE_IN_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "qk_norm": "QK-norm",
        "v_norm": "norm on v",
        "before_o": "norm before o",
        "before_down": "norm before down",
        "head_gain": "a gain a head",
        "hidden_gain": "a gain a hidden unit",
        "attention_gate": "a gate on the attention's output",
        "value_residual": "values of block 1 in later blocks",
        "linear": "linear maps",
    }
)
"""Field of `Inside` → words."""


SCHEMA = "normscope.schemes/1"


@dataclass(frozen=True)
class Row:
    """Description of one scheme.

    Attributes:
        slots: every slot that holds a norm anywhere in the stack, in the order of `Slot`.
        placement: the slots in words, with blocks and kinds if they differ.
        join: `Join.kind`.
        norm: the kind of norm that belongs to the scheme; None if any can be used.
        inside, besides: changes inside the branches, and other properties; "" for none.
    """

    name: str
    formula: str
    slots: list[str]
    placement: str
    join: str
    initialisation: str
    final_norm: bool
    norm: str | None
    inside: str
    besides: str
    reads_as: str
    source: str

    def to_dict(self) -> dict[str, object]:
        """Entry of the scheme in the output of `normscope schemes --format json`."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def catalogue(names: Iterable[str] = ()) -> list[Row]:
    """The rows of `names`, or of every scheme.

    Raises:
        UsageError: no scheme has that name; the error gives the nearest one.
    """
    return [row_of(scheme_named(name)) for name in tuple(names) or SCHEMES]


def row_of(scheme: Scheme) -> Row:
    """Describe `scheme`."""
    held = {where: scheme.placement_at(where) for where in SUBLAYERS}
    used = {slot for placement in held.values() for slot in placement.slots}
    return Row(
        name=scheme.name,
        formula=scheme.formula,
        slots=[slot.value for slot in Slot if slot in used],
        placement=_placement_words(held),
        join=scheme.join.kind,
        initialisation=_initialisation_words(scheme.initialisation),
        final_norm=Slot.FINAL in held[SUBLAYERS[-1]],
        norm=scheme.norm,
        inside=_inside_words(scheme.inside),
        besides=_besides_words(scheme),
        reads_as=scheme.reads_as,
        source=scheme.source,
    )


def _placement_words(held: Mapping[Where, Placement]) -> str:
    """The slots, with blocks if they differ: "branch_in, final" or "branch_in (blocks 4–12 of 12), …"."""
    words = []
    for slot in Slot:
        places = [where for where, placement in held.items() if slot in placement]
        everywhere = len(places) == len(held) or (slot in (Slot.ENTRY, Slot.FINAL) and places)
        if places:
            words.append(slot.value if everywhere else f"{slot.value} ({_places_words(places)})")
    return ", ".join(words) or "none"


def _places_words(places: list[Where]) -> str:
    """Describe the kinds of branch, and the blocks of the sample stack, that `places` names."""
    blocks = {kind: [where.block for where in places if where.kind == kind] for kind in KINDS}
    if len(set(map(tuple, blocks.values()))) == 1:
        return _blocks_words(blocks[KINDS[0]])
    return "; ".join(f"{kind} {_blocks_words(held)}".strip() for kind, held in blocks.items() if held)


def _blocks_words(blocks: list[int]) -> str:
    """Block numbers in words: "" for all, a range, or a list if there are gaps."""
    if len(blocks) == SAMPLE_DEPTH:
        return ""
    if len(blocks) == 1:
        return f"block {blocks[0]} of {SAMPLE_DEPTH}"
    run = blocks == list(range(blocks[0], blocks[-1] + 1))
    span = f"{blocks[0]}–{blocks[-1]}" if run else ", ".join(map(str, blocks))
    return f"blocks {span} of {SAMPLE_DEPTH}"


def _initialisation_words(initialisation: Initialisation) -> str:
    words = [WEIGHTS[initialisation.weights].words]
    by_factor: dict[str, list[str]] = {}
    for role, rule in initialisation.gains.items():
        kind: Kind = "feed-forward" if role in ("up", "gate", "down") else "attention"
        by_factor.setdefault(_rule_words(rule, kind), []).append(role)
    words += [f"{', '.join(roles)} {factor}" for factor, roles in by_factor.items() if factor]
    embedding = _rule_words(initialisation.embedding)
    words += [f"embeddings {embedding}"] if embedding else []
    words += [f"γ of {slot} = {value:g}" for slot, value in initialisation.norms.items()]
    return "; ".join(words)


def _rule_words(rule: Rule, kind: Kind = "attention") -> str:
    """Factor of a rule: "× 0", "× 0.319 at L = 12", "× 1 to 0.289 over 12 blocks"; "" if it is 1."""

    def ask(block: int, depth: int) -> float:
        return rule(Where(block, depth, kind, KINDS.index(kind)))

    first, last = ask(1, SAMPLE_DEPTH), ask(SAMPLE_DEPTH, SAMPLE_DEPTH)
    shallower = ask(1, SAMPLE_DEPTH // 2)
    if first != last:
        return f"× {first:.3g} to {last:.3g} over {SAMPLE_DEPTH} blocks"
    if first != shallower:
        return f"× {first:.3g} at L = {SAMPLE_DEPTH}"
    return "" if first == 1 else f"× {first:.3g}"


def _inside_words(inside: Inside) -> str:
    """Describe the fields that differ from their defaults."""
    words = []
    for field in dataclasses.fields(Inside):
        value = getattr(inside, field.name)
        if value != field.default:
            word = INSIDE_IN_WORDS[field.name]
            words.append(word if value is True else f"{word}: {value}")
    return "; ".join(words)


def _besides_words(scheme: Scheme) -> str:
    """Describe properties other than slots, join and the inside of branches."""
    entry = _rule_words(scheme.entry_scale)
    words = [f"input of a branch {entry}"] if entry else []
    if scheme.depth_exponent is not None:
        words.append(f"learning rates by depth, a = {scheme.depth_exponent:g} (`param_groups`)")
    if scheme.on_sphere:
        words.append("vectors of unit length, kept so by `after_step`")
    return "; ".join(words)
