"""The function part: A's weights in B, the same batch in float64, and the first place where the two part.

open     both models in float64, their holdings                                  1–2 forwards each
given    both with their own weights, and shaken, where both hold given ones   2 forwards each
walk     both with A's weights, and shaken, which measures the rounding          2 forwards each
whole    outputs and gradients of all weights: where they agree, nothing inside of the two counts
local    B with A's stream at every branch: what each branch does by itself      1 forward of B
reasons  B with everything undone that was found                                 1–3 forwards of B
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from normscope.compare.differences import compare_structures
from normscope.compare.facts import computed, differing, name_of, sentence
from normscope.compare.function_words import Wording, alike, as_data
from normscope.compare.holdings import Holdings
from normscope.compare.keys import OUTPUT, OUTSIDE, Key
from normscope.compare.made_up import without_made_up
from normscope.compare.mapping import CannotMapError, loading_notes, map_weights
from normscope.compare.mapping.changes import Change, agreement, changes
from normscope.compare.outcome import Outcome
from normscope.compare.parting import RANDOM, Walked, noise_of, walked
from normscope.compare.reasons import gradients
from normscope.compare.reasons import scenes as reasons
from normscope.compare.reasons.scene import Scene
from normscope.compare.reasons.search import Found, Search, grouped, is_given, search
from normscope.compare.rows import rows_of
from normscope.compare.side import NotGivenError, Side
from normscope.compare.step_names import amount, name_of_step
from normscope.compare.twins import (
    Opened,
    build_exactly,
    close_twin,
    open_twin,
    values_made,
    without_constants,
)
from normscope.compare.types import Compared as HowFar
from normscope.compare.types import Difference, Pair, Part, Step, Weights
from normscope.compare.walkers import CannotFeedError, Walker, fed
from normscope.compare.whole import (
    agrees,
    cut_weights,
    has_as_many,
    parts_at_end,
    uses_same_weights,
    without_partings,
)

_SEED = 1
_MOSTLY = 0.5
_LATE = 1e9
EXACT = 1e-9
"""Largest tolerance at which every difference of the computation shows, such as another ε."""
NARROW = 64 * 2.0**-24
"""Largest relative difference that comes from weights which a conversion computed in float32."""
_HEAD_FACTS = ("head_maps", "head_norms", "head_norm_eps", "head_activation")
_VALUES_ONLY = ("parallel", "expert-weights", "pooling")
"""Reasons that are undone by formulas whose gradients flow in another order."""


def compare(
    a: Side, b: Side, rows: Pair, given: Mapping[str, str] | None = None, rtol: float | None = None
) -> Outcome:
    """Compare what the two models compute.

    Args:
        rows: the aligned structures.
        given: parameter of B → parameter of A, see `--map`.
        rtol: largest relative difference that counts as equal; None measures the rounding.

    Raises:
        NotGivenError: a side has no model.
        UsageError: `given` does not fit.
    """
    try:
        outcome = _Function(a, b, rows, given or {}, rtol).run()
    except (CannotMapError, CannotFeedError) as reason:
        outcome = _not(str(reason))
    finally:
        forwards = {name: side.run(close_twin) for name, side in (("a", a), ("b", b))}
    if not outcome.compared.figures:
        return outcome
    figures = {**outcome.compared.figures, "forwards": forwards}
    return replace(outcome, compared=replace(outcome.compared, figures=figures))


def _not(reason: str) -> Outcome:
    return Outcome(HowFar(Part.FUNCTION, "not", (reason,)))


@dataclass
class _Function:
    a: Side
    b: Side
    pair: Pair
    given: Mapping[str, str]
    rtol: float | None
    said: str = ""
    stood: Walked | None = None
    random_a: Key | None = None
    random_b: Key | None = None
    notes: list[str] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)
    found: list[tuple[float, Difference]] = field(default_factory=list)
    settled: frozenset[str] = frozenset()
    are_given: bool = False
    changed: list[Change] = field(default_factory=list)
    is_made_up: bool = False

    def run(self) -> Outcome:
        """The whole part."""
        first, second = (_open(side, name) for side, name in ((self.a, "A"), (self.b, "B")))
        stacks = [[stack.name for stack in each.holdings.anatomy.stacks] for each in (first, second)]
        has_partners = len(stacks[0]) == len(stacks[1]) > 0
        self.rows = rows_of(self.pair, first.holdings.anatomy, second.holdings.anatomy)
        own = map_weights(first.holdings, second.holdings, self.rows, self.given, as_made=True)
        self.one, self.two, self.notes = fed(self.a, self.b, first, second)
        self.are_given = are_given = self._hold_given(own)
        generic = self._without_constants(first.holdings)
        self.weights = map_weights(generic, second.holdings, self.rows, self.given, as_made=are_given)
        self.one.weights = generic.parameters()
        self.two.weights = self.weights.values
        self.wording = Wording(self.one, self.two, self.rows)
        self.notes += self.wording.unmapped(self.weights)
        self.notes += loading_notes(self.weights, generic, second.holdings)
        stands = self._as_they_stand(own) if are_given and has_partners else None
        if stands is not None and not compare_structures(self.pair):
            return self._outcome(stands)
        steps_a, steps_b = self.one.walk(), self.two.walk()
        self.noise = self._rounding(steps_a, steps_b)
        found = self._compared(steps_a, steps_b)
        is_random = (self.random_a, self.random_b) != (None, None)
        holdings = (self.one.opened.holdings, self.two.opened.holdings)
        if not is_random and agrees(found, steps_a, steps_b, self.weights, *holdings):
            found = without_partings(found)
            self._settle(found, steps_a, steps_b)
        elif not has_partners:
            a, b = (" and ".join(names) or "no residual stream" for names in stacks)
            return _not(f"the two have different stacks: {a} in A, {b} in B")
        else:
            self.notes += self.wording.guessed(self.weights)
        if stands is not None:
            return self._outcome(stands)
        self._judge(found, steps_a, steps_b)
        if found.first is None and found.first_gradient is None and not is_random:
            self._say_cuts(found, steps_a, steps_b, self.weights)
        for group in alike(self.changed):
            self._add(self.wording.changed(group), group[0].at)
        if self.stood is None:
            return self._outcome(found)
        if found.first is None and found.first_gradient is None:
            return self._only_weights(found, self.stood)
        if self.is_made_up and not self.found:
            return self._only_weights(self.stood, self.stood)
        return self._outcome(found)

    def _only_weights(self, found: Walked, stood: Walked) -> Outcome:
        """The result for functions that agree with the same weights, and part as the weights stand."""
        if not parts_at_end(stood):
            return self._outcome(found)
        if not self.found and stood.largest < NARROW:
            self.said = "as they stand"
        elif not self.found and stood.first is not None:
            self._add(self.wording.parting(stood.first, "value"), stood.first.key[:3])
        return self._outcome(stood)

    def _settle(self, found: Walked, steps_a: Sequence[Step], steps_b: Sequence[Step]) -> None:
        """Note that all that the two compute is accounted for, unless the comparison shows too little."""
        if found.tolerance <= EXACT and self.one.num_tokens > 1:
            self.settled = computed(same_weights=has_as_many(steps_a, steps_b))

    def _without_constants(self, holdings: Holdings) -> Holdings:
        generic = without_constants(holdings)
        if not any(held.made_of for held in generic.held):
            return generic
        made = self.a.run(values_made, generic.parameters())
        fixed = {n for held in holdings.held if held.name not in made for n in held.made_of}
        values = {name: value for name, value in holdings.parameters().items() if name in fixed} | made
        held = tuple(replace(each, value=values.get(each.name, each.value)) for each in generic.held)
        return replace(generic, held=held)

    # Given weights

    def _hold_given(self, own: Weights) -> bool:
        """Whether both sides hold given weights, or modules whose weights are mostly the same."""
        known = (self.one.opened.holdings.is_given, self.two.opened.holdings.is_given)
        if None not in known:
            return all(known)
        return False not in known and agreement(own, self.two.opened.holdings) >= _MOSTLY

    def _as_they_stand(self, own: Weights) -> Walked | None:
        """Both with their own weights: the walk where they are the same function; else what B's weights have
        that A's lack, and None.
        """
        steps_a, steps_b = self.one.walk(own=True), self.two.walk(own=True)
        self.noise = self._rounding(steps_a, steps_b, own=True)
        found = self._compared(steps_a, steps_b)
        if found.first is None and found.first_gradient is None:
            self.said = "as they stand"
            self._say_cuts(found, steps_a, steps_b, own)
            return found
        holdings = self.two.opened.holdings
        self.changed = list(changes(own, self.one.opened.holdings, holdings, _head_widths(steps_b)))
        self.stood = found
        return None

    def _say_cuts(
        self, found: Walked, steps_a: Sequence[Step], steps_b: Sequence[Step], weights: Weights
    ) -> None:
        """Name the weights that no gradient reaches on one side, where all tensors between agree."""
        one, two = self.one.opened.holdings, self.two.opened.holdings
        for ours, theirs, side in cut_weights(found, steps_a, steps_b, weights, one, two):
            self._add(self.wording.cut(ours, theirs, side), (OUTSIDE, OUTSIDE, OUTSIDE), _LATE)

    # Walking

    def _rounding(
        self, steps_a: tuple[Step, ...], steps_b: tuple[Step, ...], *, own: bool = False
    ) -> dict[Key, tuple[float, float]]:
        """The larger rounding of both sides, by A's keys; with `own` weights instead of those that walk."""
        shaken_a = self.one.walk(own=own, shaken=True, seed=_SEED)
        shaken_b = self.two.walk(own=own, shaken=True, seed=_SEED)
        noise = noise_of(steps_a, shaken_a, self.one.real)
        others = noise_of(steps_b, shaken_b, self.two.real)
        self.random_a = self.random_a or _first_random(noise, steps_a, self.one)
        self.random_b = self.random_b or _first_random(others, steps_b, self.two)
        to_a = self.rows.to_a
        for (*at, name), rounding in others.items():
            place = to_a.get(tuple(at))  # type: ignore[arg-type]
            if place is not None and self.random_b is None:
                mine = noise.get((*place, name), (0.0, 0.0))
                noise[*place, name] = (max(mine[0], rounding[0]), max(mine[1], rounding[1]))
        if self.random_a is not None:
            noise = dict.fromkeys(noise, (0.0, 0.0))
        return noise

    def _compared(self, steps_a: Sequence[Step], steps_b: Sequence[Step]) -> Walked:
        one, two = self.one.opened.holdings, self.two.opened.holdings
        return walked(steps_a, steps_b, one, two, self.rows, self.noise, self.rtol, self.one.real)

    # Judging

    def _judge(self, found: Walked, steps_a: Sequence[Step], before: Sequence[Step]) -> None:
        """Find the reasons; `before` are B's steps without patches."""
        if found.first is not None:
            result = self._search(found, steps_a)
            counted, self.changed = without_made_up(result.found, self.changed, self.two.opened.holdings)
            self.is_made_up = len(counted) < len(result.found)
            for group in grouped([one for each in counted for one in self._of_head(each)]):
                self._add(self.wording.because(group), group[0].b)
            self._say_random()
            if not self.found and not self.changed and not self.is_made_up:
                self._add(self.wording.parting(found.first, "value"), found.first.key[:3])
            if not result.is_explained:
                self.notes.append("The reasons that were found do not explain the whole difference.")
                return
            if uses_same_weights(steps_a, before, self.weights):
                self._settle(found, steps_a, before)
            if any(each.reason.name in _VALUES_ONLY or is_given(each.reason) for each in result.found):
                return  # no gradient flows through A's own tensors
            if counted:
                self.notes.append("With these differences undone in B, the rest of the forward is the same.")
            steps_b: Sequence[Step] = self._unpatched(result)
            found = self._compared(steps_a, tuple(steps_b))
        else:
            self._say_random()
            steps_b = [each.b for each in found.pairs if each.b is not None]
        if found.first_gradient is not None:
            self._judge_gradients(found, steps_a, steps_b)

    def _of_head(self, found: Found) -> list[Found]:
        """The difference of structure where heads give other values, if there is one; else the finding."""
        a, b = self.pair.a, self.pair.b
        if found.reason.name != "weights" or found.reason.step != OUTPUT or a is None or b is None:
            return [found]
        facts = [fact for fact in differing(a.facts, b.facts) if fact in _HEAD_FACTS]
        made = [
            replace(
                found.reason, name=name_of(fact), a=values[0], b=values[1], message=sentence(fact, *values)
            )
            for fact in facts
            for values in [(a.facts[fact], b.facts[fact])]
        ]
        return [replace(found, reason=reason) for reason in made] or [found]

    def _judge_gradients(self, found: Walked, steps_a: Sequence[Step], steps_b: Sequence[Step]) -> None:
        """The last branch of the forward whose gradients part for a reason of its own, and cuts before it."""
        assert found.first_gradient is not None
        a, b = self._side(self.one, steps_a), self._side(self.two, steps_b)
        placed = list(reasons.scenes_of(a, b, self.rows.to_a, max(found.tolerance, 1e-12)))
        known: list[Found] = []
        for one in reversed(placed):
            shared = b.map.shared(one.b) if one.scene.b.before else set()
            names = (name for name in b.map.order_of(one.b) if b.map.places[*one.b, name].site not in shared)
            order = [name for name in names if not _is_entry(one.scene, name)]
            reason = next(gradients.reasons(one.scene, order, cuts_only=bool(known)), None)
            if reason is not None:
                known.append(Found(one.a, one.b, reason))
        for group in grouped(known):
            self._add(self.wording.because(group, is_gradient=True), group[0].b, _LATE)
        if not known:
            self._add(
                self.wording.parting(found.first_gradient, "gradient"), found.first_gradient.key[:3], _LATE
            )

    def _unpatched(self, result: Search) -> list[Step]:
        """B's steps without the patched tensors, which may stand for another step now."""
        sites = {patch.value.site for patch in result.patches if patch.kind == "site"}
        places = self.two.opened.holdings.places
        return [step for step in result.steps if step.key not in places or places[step.key].site not in sites]

    def _side(self, walker: Walker, steps: Sequence[Step]) -> reasons.Walked:
        """A side for the reasons."""
        own = walker.opened.holdings.parameters()
        parameters = own | dict(walker.weights or {})
        return reasons.Walked(reasons.map_of(walker.opened.holdings), steps, parameters, walker.real)

    def _say_random(self) -> None:
        """Say so where a model is random in eval mode."""
        if self.random_a is not None and self.random_b is not None:
            self.notes.append(
                "Both models are random in eval mode; they were compared with the same random numbers."
            )
            return
        for key, walker, side in ((self.random_a, self.one, "A"), (self.random_b, self.two, "B")):
            known = any(each.name == "dropout-left-on" for _, each in self.found)
            if key is None or known:
                continue
            at = key[:3] if side == "B" else self.rows.to_b.get(key[:3], key[:3])
            site = walker.site_at(key[:3])
            sites = (
                self.one.site_at(self.rows.to_a.get(at, at)),
                self.two.site_at(self.rows.to_b.get(self.rows.to_a.get(at, at), at)),
            )
            where = f"{name_of_step(key[3])} of {site or 'the model'}"
            message = f"{side} alone is random in eval mode, from {where} on, as where dropout is left on."
            values = ("random", "deterministic") if side == "A" else ("deterministic", "random")
            self.found = [
                each for each in self.found if each[1].name != "function" or each[1].sites != (sites,)
            ]
            self._add(Difference(Part.FUNCTION, "dropout-left-on", (sites,), *values, message), at)

    def _add(self, difference: Difference, at: tuple[int, int, int], late: float = 0.0) -> None:
        """Keep a difference with its place in the order of B's forward."""
        s, i, n = at
        inside = 999.0 if n == i == OUTSIDE != s else i + max(n, 0) / 1000
        self.found.append((late + 1000.0 * s + inside, difference))

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences in the order of the forward, those of gradients last; the first one is marked."""
        ordered = [difference for _, difference in sorted(self.found, key=lambda each: each[0])]
        return tuple(replace(each, is_first=n == 0) for n, each in enumerate(ordered))

    def _search(self, found: Walked, steps_a: Sequence[Step]) -> Search:
        two = self.two
        b = self._side(two, ())
        return search(
            self._side(self.one, steps_a),
            b.map,
            b.parameters,
            lambda patches: two.walk(tuple(patches), gradients=False),
            self.rows.to_a,
            tolerance=max(found.tolerance, 1e-12),
            last=lambda patches: two.walk(tuple(patches)),
            is_random=self.random_b is not None and self.random_a is None,
        )

    # Result

    def _outcome(self, found: Walked) -> Outcome:
        largest = max(found.largest, 0.0)
        if self.differences:
            said = f"not the same function: {self.differences[0].message}"
        else:
            stand = f" {self.said}" if self.said else ""
            same = f"the same function to {amount(largest)}" if largest else "exactly the same function"
            said = f"{same}{stand}"
        figures = {
            "largest": largest,
            "largest_gradient": found.largest_gradient,
            "tolerance": found.tolerance,
            "mapped": len(self.weights.values),
            "walk": [self.wording.row(each) for each in found.pairs],
        }
        self._require_outputs(found)
        if not self.differences and (spoilt := self._first_spoilt(found)) is not None:
            self.whys.append(f"both give values that are not finite, from {spoilt} on")
            return Outcome(
                HowFar(Part.FUNCTION, "not", tuple(self.whys), figures=figures),
                weights=as_data(self.weights),
                notes=tuple(self.notes),
            )
        compared = HowFar(Part.FUNCTION, "partly" if self.whys else "whole", tuple(self.whys), said, figures)
        return Outcome(
            compared, self.differences, as_data(self.weights), tuple(self.notes), self.settled, self.are_given
        )

    def _first_spoilt(self, found: Walked) -> str | None:
        """The first place of the stream whose values are not finite."""
        for each in found.stream():
            if each.a is not None and each.a.value is not None and not bool(each.a.value.isfinite().all()):
                return self.one.site(each.a) or "the input"
        return None

    def _require_outputs(self, found: Walked) -> None:
        """Say so where the outputs of the two cannot be compared."""
        ends = [each for each in found.pairs if each.key[3] == OUTPUT]
        if not ends:
            return
        both = (ends[0].a, ends[0].b)
        a, b = (None if step is None or step.value is None else tuple(step.value.shape) for step in both)
        if ends[0].relative is None:
            shapes = ["none" if each is None else " × ".join(map(str, each)) for each in (a, b)]
            self.whys.append(f"the outputs have different shapes: {shapes[0]} in A and {shapes[1]} in B")
        elif a is not None and b is not None and a != b:
            self.whys.append(f"only the first {min(a[-1], b[-1])} outputs were compared: one side has more")


def _open(side: Side, name: str) -> Opened:
    with contextlib.suppress(NotGivenError):  # a module: its tables in float32 are widened
        side.start(build_exactly, (_SEED, _SEED + 1))
    try:
        opened: Opened = side.run(open_twin)
    except NotGivenError as reason:
        raise CannotFeedError(f"{name} ({side.spec}) {reason}") from reason
    return opened


def _is_entry(scene: Scene, name: str) -> bool:
    """Whether the gradients of a step differ by the way in which a model is written: a norm's input that is
    the branch's entry, whose gradient includes the skip's; queries and keys with the scale in them.
    """
    if name in ("query", "key"):
        return not scene.is_same(name)
    return name.endswith(" in") and any(
        name in half.places and "entry" in half.places and half.places[name].site == half.places["entry"].site
        for half in (scene.a, scene.b)
    )


def _head_widths(steps: Sequence[Step]) -> dict[tuple[int, int, int], int]:
    """Width of the heads of each attention."""
    operands = [step for step in steps if step.key[3] == "query" and step.value is not None]
    return {step.key[:3]: step.value.shape[-1] for step in operands if step.value is not None}


def _first_random(
    noise: Mapping[Key, tuple[float, float]], steps: Sequence[Step], walker: Walker
) -> Key | None:
    """The first step that another seed changes; a forward more where the rounding alone is large."""
    if all(value <= RANDOM for value, _ in noise.values()):
        return None
    other = noise_of(steps, walker.walk(seed=_SEED, gradients=False), walker.real)
    return next((key for key, (value, _) in other.items() if value > 0), None)
