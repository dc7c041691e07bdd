"""Types of a comparison: facts of a side, differences, and the result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

Level = Literal["model", "stack", "block", "branch"]


class Part(StrEnum):
    """Part of a comparison, in the order in which they are made."""

    STRUCTURE = "structure"
    START = "start"
    RECIPE = "recipe"
    FUNCTION = "function"
    VERDICT = "verdict"


@dataclass(frozen=True)
class Place:
    """Model, stack, block or branch of one side, with its facts.

    Attributes:
        level: what it is.
        name: path of its module, with its call; for a stack its name, for the model "".
        facts: fact → value as plain data, see `FACTS` in facts.py. A fact that is absent is unknown (a saved
            report has few of them) and is never compared; a value of None says that there is none.
        parts: the places inside: stacks, blocks or branches, in order.
    """

    level: Level
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple["Place", ...] = ()


@dataclass(frozen=True)
class Pair:
    """Places of A and B that belong together; one of them is None where a side lacks it."""

    a: Place | None
    b: Place | None
    parts: tuple["Pair", ...] = ()


@dataclass(frozen=True)
class Difference:
    """One difference, at one place or at many.

    Attributes:
        part: the part of the comparison that found it.
        name: its name, such as "norm-eps"; frozen, see `NAMES` in names.py.
        sites: (site in A, site in B), None where a side lacks it; "" is the model.
        a, b: the two values as plain data; None where there is none.
        message: a sentence, with both values.
        evidence: further sentences: how it was found, what was tried.
        confirmed: True where undoing it made the difference vanish, False where it did not, None untried.
        is_first: whether it is the first place where the functions part.
    """

    part: Part
    name: str
    sites: tuple[tuple[str | None, str | None], ...]
    a: Any
    b: Any
    message: str
    evidence: tuple[str, ...] = ()
    confirmed: bool | None = None
    is_first: bool = False


@dataclass(frozen=True)
class Compared:
    """The extent to which a part was compared, and its result.

    Attributes:
        how: "whole", "partly" or "not".
        why: sentences on what was not compared and for which reason; empty for "whole".
        said: a sentence on the result, such as "the same function to 3e-12".
        figures: figures of the part as plain data (largest relative difference, number of mapped weights, …).
    """

    part: Part
    how: Literal["whole", "partly", "not"]
    why: tuple[str, ...] = ()
    said: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Weights:
    """Weights of A as those of B.

    Attributes:
        values: parameter or buffer of B → A's values in B's layout.
        made_from: parameter of B → (parameters of A, how, in words: "rows 0–63 of c_attn, transposed").
        only_a, only_b: parameters without a partner.
        guessed: parameters of B whose partner was chosen by shape or value alone.
        filled: parameters of B of which A lacks a part, such as a bias: it is filled with zeros or ones.
    """

    values: Mapping[str, Tensor]
    made_from: Mapping[str, tuple[tuple[str, ...], str]]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """A change of one side's model for one forward, by which a reason is tried, as plain data.

    Attributes:
        kind: "attribute" (set a module's attribute), "parameter" (replace values), "output" (multiply a
            module's output), "function" (replace a function of PyTorch inside a module), …; see patches.py.
        path: module or parameter.
        value: its argument.
    """

    kind: str
    path: str
    value: Any


@dataclass(frozen=True)
class Step:
    """One tensor on the way through a model: the stream at a branch, or a tensor inside of the branch.

    Attributes:
        key: (stack, block, branch, name): numbers of the places in this side's anatomy, -1 where the tensor
            lies outside. In the order of the forward the names are: "embedding"; in a branch "entry"; for the
            norm of number i "norm i in" and "norm i"; for an attention "q", "k", "v" (outputs of the
            projections (B, T, features), fused ones split), "query", "key", "value" (as they are multiplied,
            (B, H, T, K)), "logits", "probabilities", "mixed" (what the output projection reads), "o"; for a
            feed-forward "up", "gate", "act" (what `down` reads), "down"; then "output" and "sum"; "exit" of a
            block; "final norm in", "final norm", "hidden" and "output of the model".
        site: name of the place, for a person.
        value: float64; None where it did not run.
        gradient: of the loss in it, None where none was asked for.
    """

    key: tuple[int, int, int, str]
    site: str
    value: Tensor | None
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Diff:
    """The comparison of two models.

    Attributes:
        a, b: the two as the user wrote them.
        rows: the aligned structures, from the model down to the branches.
        parts: how far each part was compared, in order.
        differences: all differences, part by part, within a part in the order of the forward pass; the first
            of the function part is where the functions part.
        weights: how the weights were mapped, None where they were not.
        notes: further facts that a reader must know.
        cost: seconds by part.
        versions: by package.
    """

    a: str
    b: str
    rows: Pair
    parts: tuple[Compared, ...]
    differences: tuple[Difference, ...]
    weights: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    cost: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: str = "normscope.diff/1"

    def of(self, part: Part) -> tuple[Difference, ...]:
        """The differences of a part."""
        return tuple(each for each in self.differences if each.part is part)

    @property
    def is_same(self) -> bool:
        """Whether no part found a difference; parts that were not compared say nothing."""
        return not self.differences

    def to_text(self, width: int = 110) -> str:
        """The comparison as plain text of `width` columns."""
        from normscope.compare.text import render_text  # it reads Diff

        return render_text(self, width)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data that strict JSON can hold, in the schema of schemas/diff.json."""
        from normscope.compare.document import to_dict  # it reads Diff

        return to_dict(self)

    def to_json(self) -> str:
        """One JSON object, indented."""
        from normscope.compare.document import to_json  # it reads Diff

        return to_json(self)

    def to_markdown(self, command: str | None = None) -> str:
        """The comparison for a pull request; `command` is the shell command that made it."""
        from normscope.compare.markdown import render_markdown  # it reads Diff

        return render_markdown(self, command)

    def to_html(self, path: str | Path | None = None, *, command: str | None = None) -> str:
        """The comparison as one self-contained HTML page.

        Args:
            path: file to write it to; None only returns it.
            command: shell command that made the comparison.
        """
        from normscope.compare.page import render_html  # it reads Diff

        page = render_html(self, command)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        """The comparison in a notebook cell."""
        from normscope.compare.notebook import diff_html  # it reads Diff

        return diff_html(self)

    def __repr__(self) -> str:
        """The two and the names of their differences, for a prompt: the whole would fill pages."""
        names = ", ".join(dict.fromkeys(each.name for each in self.differences))
        return f"<Diff of {self.a} and {self.b}: {names or 'no difference'}>"
