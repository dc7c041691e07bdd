"""The differences of the function part and its notes, in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.compare.keys import OUTSIDE, way_in
from normscope.compare.mapping.changes import Change
from normscope.compare.parting import Compared
from normscope.compare.reasons.search import NO_REASON, UNKNOWN, Found
from normscope.compare.rows import Rows
from normscope.compare.step_names import amount, name_of_step
from normscope.compare.types import Difference, Part, Weights
from normscope.compare.walkers import Walker
from normscope.report.sites import compress

_SHOWN = 5


@dataclass(frozen=True)
class Wording:
    """Two sides and their aligned rows, which name the places of a finding."""

    one: Walker
    two: Walker
    rows: Rows

    def changed(self, group: list[Change]) -> Difference:
        """The difference of weights that were changed alike."""
        to_a, first = self.rows.to_a, group[0]
        sites = tuple(
            (self.one.site_at(to_a[each.at]) if each.at in to_a else None, self.two.site_at(each.at))
            for each in group
        )
        more = {1: "", 2: " The same holds for one more weight."}
        message = first.message + more.get(len(group), f" The same holds for {len(group) - 1} more weights.")
        evidence = ("Both hold given weights; A's were compared with B's after mapping.",)
        places = tuple(dict.fromkeys(sites))
        return Difference(Part.FUNCTION, first.name, places, first.a, first.b, message, evidence)

    def because(self, group: Sequence[Found], *, is_gradient: bool = False) -> Difference:
        """The difference of one reason at one place or many."""
        reason = group[0].reason
        sites = self._sites(group)
        size = max(each.relative for each in group)
        where = name_of_step(reason.step)
        evidence = [f"The two part at {where}, by {amount(size)} of its largest value."] if size else []
        if is_gradient:
            evidence = ["The values agree; the gradients of a random linear loss do not."]
        known = [each.is_confirmed for each in group]
        if num := sum(each is True for each in known):
            where = "" if num == len(known) else f" at {num} of {len(known)} places"
            evidence.append(f"The difference vanishes{where} where this is undone in B.")
        evidence += reason.others
        confirmed = None if all(each is None for each in known) else all(each is not False for each in known)
        name = "function" if reason.name == UNKNOWN else reason.name
        return Difference(
            Part.FUNCTION,
            name,
            sites,
            reason.a,
            reason.b,
            self._message(group),
            tuple(evidence),
            confirmed,
        )

    def _message(self, group: Sequence[Found]) -> str:
        """The message of a reason; behind the stack, an unknown one names what one side lacks before it."""
        message = group[0].reason.message
        is_behind = any(each.b[0] >= 0 > max(each.b[1:]) for each in group)
        if group[0].reason.name != UNKNOWN or not is_behind or not (lacking := self._lacking()):
            return message
        return message.replace(NO_REASON, f".{lacking} No further reason was found.", 1)

    def _sites(self, group: Sequence[Found]) -> tuple[tuple[str, str], ...]:
        """The places of a group; the way into the first stack has its name where later ones are meant too."""
        way = way_in(0)
        is_later = any(each.b != way and each.b == way_in(each.b[0]) for each in group)
        first = (0, OUTSIDE, OUTSIDE)
        return tuple(
            (
                self.one.site_at(first if is_later and each.a == way else each.a),
                self.two.site_at(first if is_later and each.b == way else each.b),
            )
            for each in group
        )

    def cut(self, ours: Iterable[str], theirs: Iterable[str], side: str) -> Difference:
        """The difference of weights whose gradient is cut in one side alone."""
        names = [" and ".join(sorted(each)) for each in (ours, theirs)]
        message = (
            f"The gradient of {names[0]} in A, {names[1]} in B, is cut in {side} alone, as by detach(): "
            "it is zero there."
        )
        values = ("flows", "cut") if side == "B" else ("cut", "flows")
        modules = tuple(name.rpartition(".")[0] for name in (min(ours), min(theirs)))
        evidence = ("The values agree; the gradients of a random linear loss do not.",)
        return Difference(
            Part.FUNCTION, "gradient-cut", ((modules[0], modules[1]),), *values, message, evidence
        )

    def parting(self, at: Compared, what: str) -> Difference:
        """The difference of a place that parts for no known reason; `what` is "value" or "gradient"."""
        name = name_of_step(at.key[3])
        size = at.relative if what == "value" else at.gradient
        tensor = f"{name}" if what == "value" else f"the gradient of the loss in {name}"
        message = f"The two part at {tensor}, by {amount(size)} of its largest value."
        sites = (self.one.site(at.a), self.two.site(at.b))
        return Difference(
            Part.FUNCTION,
            "function" if what == "value" else "gradient",
            (sites,),
            None,
            None,
            message + self._lacking(),
        )

    def _lacking(self) -> str:
        """A sentence on blocks and branches that one side lacks, where there are any."""
        names_of: dict[str, list[str]] = {"A": [], "B": []}
        for walker, known, other in (
            (self.one, set(self.rows.to_b), "B"),
            (self.two, set(self.rows.to_a), "A"),
        ):
            for s, stack in enumerate(walker.opened.holdings.anatomy.stacks):
                for i, block in enumerate(stack.blocks):
                    branches = [each.site for n, each in enumerate(block.branches) if (s, i, n) not in known]
                    names = [block.site] if (s, i, OUTSIDE) not in known else branches
                    names_of[other] += names
        return "".join(f" {side} lacks {compress(names)}." for side, names in names_of.items() if names)

    def row(self, each: Compared) -> dict[str, Any]:
        """A pair of steps as plain data."""
        return {
            "a": self.one.site(each.a),
            "b": self.two.site(each.b),
            "name": name_of_step(each.key[3]),
            "relative": each.relative,
            "gradient": each.gradient,
        }

    def unmapped(self, weights: Weights) -> list[str]:
        """Notes on weights without a partner, and on computed weights."""
        notes = []
        for side, names in (("A", weights.only_a), ("B", weights.only_b)):
            if names:
                other = "B" if side == "A" else "A"
                kept = "; they keep their own values" if side == "B" else ""
                notes.append(f"Weights of {side} without a partner in {other}{kept}: {_first(names)}.")
        made = [held.name for held in self.two.opened.holdings.held if held.made_of]
        if put := [name for name in made if name in weights.values]:
            shown = _first(put)
            notes.append(f"B computes these weights; what A multiplies with was put in their place: {shown}.")
        return notes

    def guessed(self, weights: Weights) -> list[str]:
        """A note on the partners that were guessed, where there are any."""
        shown = _first(weights.guessed)
        words = f"The partners of these weights of B were guessed: {shown}. --map FILE sets them."
        return [words] if weights.guessed else []


def _first(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def alike(found: Iterable[Change]) -> list[list[Change]]:
    """Changes of one kind in one role, together."""
    groups: dict[tuple[Any, ...], list[Change]] = {}
    for each in found:
        role = "" if each.name == "weights-rounded" else each.role
        values: Any = (str(each.a), str(each.b))
        if each.name == "weights-order" and role in values:  # two that are exchanged are one difference
            role, values = "", tuple(sorted(values))
        groups.setdefault((each.name, role, values), []).append(each)
    return list(groups.values())


def as_data(weights: Weights) -> dict[str, Any]:
    """The mapping of weights as plain data."""
    return {
        "made_from": {
            name: {"from": list(names), "how": how} for name, (names, how) in weights.made_from.items()
        },
        "only_a": list(weights.only_a),
        "only_b": list(weights.only_b),
        "guessed": list(weights.guessed),
    }
