"""Walk through a model in float64: one forward, and the tensors on the way as `Step`s.

    twin_of(subject, build)      the model in float64, read once                          (one forward)
    twin.walk(batch, weights)    the steps of one forward                                 (one forward)

A twin counts its forwards. The subject's own model stays as it is.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normscope.anatomy import Anatomy, Site, capture, measuring, named_parameters
from normscope.anatomy.assemble import assemble
from normscope.anatomy.graph import Graph, Value
from normscope.anatomy.reading import record_forward
from normscope.compare.exact import exact, wide, wide_copy, widen
from normscope.compare.keys import OUTPUT, OUTSIDE, WEIGHT, Key
from normscope.compare.step_places import Place, PlaceMaker, places_of
from normscope.compare.types import Patch, Step
from normscope.subjects.rng import seeded
from normscope.subjects.subject import Batch, Subject, call_model
from normscope.subjects.untouched import untouched

T = TypeVar("T")
_STEP = 2.0**-52
_NOISE_SEED = 20_011


@dataclass
class Twin:
    """A subject's model in float64, with its own reading.

    Attributes:
        subject: whose model it is.
        model: the copy.
        rough: names of buffers with the rounding of float32, such as tables of positions; others are exact.
        graph, anatomy: the reading of the copy.
        forwards: number of forwards so far.
        rows: key of a fused projection's step → role → its features there; `holdings_of` fills it in.
        made: computed weight → the sites where it is; `holdings_of` fills it in.
        steady: tensors that are not shaken, since parametrisations may need exact values: `orthogonal` does.
    """

    subject: Subject
    model: nn.Module
    rough: frozenset[str]
    graph: Graph
    anatomy: Anatomy
    forwards: int = 0
    rows: dict[Key, dict[str, Tensor]] = field(default_factory=dict)
    made: dict[str, tuple[Site, ...]] = field(default_factory=dict)
    steady: frozenset[str] = frozenset()
    _own: dict[str, Tensor] = field(default_factory=dict)
    _applied: Any = None

    def __post_init__(self) -> None:
        self._own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._own |= {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._maker = PlaceMaker(self.graph)
        self.places = tuple(places_of(self.anatomy, self._maker))
        self.embedding_norm = self._maker.embedding_norm(self.anatomy)
        self._plain = dict(_plain_names(self.model))

    def own(self, name: str) -> Tensor:
        """The subject's value of a parameter or a buffer, by its plain name, in float64."""
        return self._own[self._plain.get(name, name)]

    def value(self, site: Site) -> Value | None:
        """The graph's value at a site."""
        return self._maker.value(site)

    def walk(
        self,
        batch: Batch,
        weights: Mapping[str, Tensor] | None = None,
        patches: Sequence[Patch] = (),
        *,
        gradients: bool = True,
        shaken: bool = False,
        before: bool = False,
        real: Tensor | None = None,
        columns: int | None = None,
        seed: int = 0,
    ) -> tuple[Step, ...]:
        """The steps of one forward in eval mode, in the order of the forward.

        Args:
            batch: arguments of the forward; its floats are widened.
            weights: parameter, buffer or computed weight → value that replaces the model's own.
            patches: changes for this forward, see `patches.py`.
            gradients: whether steps have gradients, of ⟨C, output⟩ with a fixed random C.
            shaken: multiply every parameter by 1 ± 2⁻⁵² (`rough` buffers by 1 ± 2⁻²⁴), to see how far
                rounding reaches.
            before: whether a step that a patch replaces is given as it was before.
            real: (B, T), true at the tokens whose outputs count; the others get no gradient.
            columns: number of outputs of a token that count, the first ones; None for all.
            seed: of the random generators during the forward.
        """
        put = [
            Patch("tensor", "", (site, value))
            for name, value in (weights or {}).items()
            for site in self.made.get(name, ())
        ]
        with self._world(weights, (*put, *patches), shaken) as model, seeded(seed):
            run = lambda: call_model(model, _wide_batch(batch))  # noqa: E731
            self.forwards += 1
            output, found = capture(model, run, [each.site for p in self.places for each in (p, *p.others)])
            applied = None
            if self._applied is not None and not before:  # a capture sees a patched tensor as it was before
                found |= {site: t for site, t in self._applied.replaced.items() if site in found}
                applied = self._applied
            followed = self._follow(output, found, gradients, (real, columns), applied)
        return self._steps(followed, found)

    def _split(self, step: Step) -> list[Step]:
        """One step for each role of a fused projection, whose features are `rows` of it."""
        rows = self.rows.get(step.key)
        if (
            rows is None
            or step.value is None
            or any(int(r.max()) >= step.value.shape[-1] for r in rows.values())
        ):
            return [step]
        return [
            Step((*step.key[:3], role), step.site, _rows(step.value, each), _rows(step.gradient, each))
            for role, each in rows.items()
        ]

    def look(self, sites: Collection[Site], read: Callable[[Mapping[Site, Tensor]], T]) -> T:
        """Result of `read` on the tensors at `sites` of one forward, with their graph."""
        with self._world(None, (), False) as model, seeded(0):
            self.forwards += 1
            _, found = capture(model, lambda: call_model(model, _wide_batch(self.subject.batch)), sites)
            return read(found)

    @contextmanager
    def own_weights(self) -> Iterator[nn.Module]:
        """The model with its own weights, for a forward in float64."""
        self._put({}, shaken=False)
        with exact():
            yield self.model

    @contextmanager
    def _world(
        self, weights: Mapping[str, Tensor] | None, patches: Sequence[Patch], shaken: bool
    ) -> Iterator[nn.Module]:
        self._put(weights or {}, shaken)
        self._applied = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(untouched(self.model))
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
            if patches:
                from normscope.compare.patches import patched

                self._applied = stack.enter_context(patched(self.model, patches))
            stack.enter_context(measuring(self.model))
            stack.enter_context(exact())
            yield self.model

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor], shaken: bool) -> None:
        generator = torch.Generator().manual_seed(_NOISE_SEED)
        names = {id(p): name for name, p in named_parameters(self.model)}
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        for name, tensor in tensors:
            plain = names.get(id(tensor), name)
            value = weights.get(plain, self._own[name])
            if shaken and _has_digits(tensor) and plain not in self.steady:
                step = 2.0**-24 if name in self.rough else _STEP
                signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
                value = value * (1 + step * signs.to(torch.float64))
            tensor.copy_(value)

    def _follow(
        self,
        output: Any,
        found: Mapping[Site, Tensor],
        gradients: bool,
        counted: tuple[Tensor | None, int | None],
        applied: Any,
    ) -> "_Followed":
        """Tensors and gradients of a forward; where `applied` put one, its step has its own value."""
        final = main_output(output)
        places = [place for place in self.places if place.site in found]
        tensors = [
            found[place.site]
            if applied is None or not _makes(place.key)
            else applied.made(place.site, found[place.site])
            for place in places
        ]
        grads: list[Tensor | None] = [None] * len(tensors)
        own: dict[str, Tensor | None] = {}
        by_site: dict[Site, Tensor | None] = {}
        final_grad = None
        if gradients and final is not None and final.requires_grad:
            final_grad, (real, columns) = cotangent(final), counted
            if columns is not None and final.shape[-1] > columns:
                final_grad[..., columns:] = 0.0
            if real is not None and final.shape[:2] == real.shape:
                final_grad = final_grad * real.to(final_grad).reshape(*real.shape, *[1] * (final.ndim - 2))
            parameters = dict(named_parameters(self.model))
            others = [found[each.site] for p in places for each in p.others if each.site in found]
            leaves = [t for t in (*tensors, *others, *parameters.values()) if t.requires_grad]
            unique = list({id(t): t for t in leaves}.values())
            given = torch.autograd.grad(final, unique, final_grad, allow_unused=True)
            by_id = {id(t): g for t, g in zip(unique, given, strict=True)}
            if self._applied is not None:
                by_id |= self._applied.gradients
            grads = [by_id.get(id(t)) for t in tensors]
            by_site = {site: by_id.get(id(t)) for site, t in found.items()}
            learnt = {name for name, p in named_parameters(self.subject.model) if p.requires_grad}
            own = {name: by_id.get(id(p)) for name, p in parameters.items()}
            own = {name: g for name, g in own.items() if g is not None or name in learnt}
        return _Followed((final, final_grad), list(zip(places, tensors, grads, strict=True)), by_site, own)

    def _steps(self, followed: "_Followed", found: Mapping[Site, Tensor]) -> tuple[Step, ...]:
        """The steps of one forward. Call it outside `exact()`, which makes each op slower."""
        (final, final_grad), by_site, own = followed.output, followed.by_site, followed.own
        steps = []
        for place, tensor, grad in followed.placed:
            value, gradient = tensor.detach(), None if grad is None else grad.detach()
            if place.layout is not None:
                value = place.layout.apply(value)
                gradient = None if gradient is None else place.layout.apply(gradient)
            whole = _joined(value, place, found), _joined(gradient, place, by_site)
            steps += self._split(Step(place.key, place.name, *map(_plain, whole)))
        if final is not None:
            key = (OUTSIDE, OUTSIDE, OUTSIDE, OUTPUT)
            steps.append(Step(key, OUTPUT, _plain(final.detach()), _plain(final_grad)))
        steps += [
            Step((OUTSIDE, OUTSIDE, OUTSIDE, f"{WEIGHT}{n}"), n, None, _plain(g)) for n, g in own.items()
        ]
        return tuple(steps)


@dataclass
class _Followed:
    """Tensors and gradients of one forward: its output, places, and gradients by site and by parameter."""

    output: tuple[Tensor | None, Tensor | None]
    placed: list[tuple[Place, Tensor, Tensor | None]]
    by_site: dict[Site, Tensor | None]
    own: dict[str, Tensor | None]


def _joined(tensor: Tensor | None, place: Place, found: Mapping[Site, Tensor | None]) -> Tensor | None:
    """The heads of a place in one tensor, where each has its own attention; None where one is missing."""
    parts = [tensor]
    for each in place.others:
        other, layout = found.get(each.site), each.layout
        parts.append(layout.apply(other.detach()) if other is not None and layout is not None else None)
    known = [part for part in parts if part is not None]
    return torch.cat(known, 1) if len(known) == len(parts) > 1 else tensor if len(parts) == 1 else None


def _makes(key: Key) -> bool:
    """Whether a step is the result of its part, not what a branch or a norm reads."""
    is_entry = key[3] == "entry" and key[2] != OUTSIDE
    return not is_entry and not key[3].endswith(" in")


def _rows(tensor: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.index_select(-1, rows)


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous().cpu()


def twin_of(subject: Subject, rebuilt: nn.Module | None = None) -> Twin:
    """The model in float64 with its reading: one forward.

    Args:
        subject: the model and its batch.
        rebuilt: the same model, built inside `exact()`; its parameters get the subject's values.
    """
    model = None if rebuilt is None else _filled(rebuilt, subject.model)
    rough: frozenset[str] = frozenset()
    if model is None:
        model = wide_copy(subject.model)
        rough = frozenset(_sharpened(model, subject.model))
    with exact():
        graph = record_forward(model, _wide_batch(subject.batch))
    return Twin(subject, model, rough, graph, assemble(graph), forwards=1)


def reread(twin: Twin, batch: Batch) -> Twin:
    """The same model with its reading on another batch: one forward."""
    with twin.own_weights() as model:
        graph = record_forward(model, _wide_batch(batch))
    subject, forwards = twin.subject, twin.forwards + 1
    return Twin(subject, twin.model, twin.rough, graph, assemble(graph), forwards, steady=twin.steady)


@torch.no_grad()
def _sharpened(model: nn.Module, original: nn.Module) -> Iterator[str]:
    """Give rotary frequencies their exact values; yield the names of the other buffers that were rounded."""
    narrow = {name: b for name, b in original.named_buffers() if _has_digits(b)}
    for name, buffer in model.named_buffers():
        if name not in narrow or narrow[name].dtype in (torch.float64, torch.complex128):
            continue
        exact_values = None if buffer.is_complex() else _frequencies(buffer)
        if exact_values is not None:
            buffer.copy_(exact_values)
        elif not bool((buffer == buffer.round()).all()):
            yield name


def _frequencies(values: Tensor) -> Tensor | None:
    """base^(−i/n) for i < n, in float64, where these are that in float32 for a base of at most six digits."""
    n = values.numel()
    if values.ndim != 1 or n < 2 or not bool((values > 0).all()) or float(values[0]) != 1.0:
        return None
    base = float(f"{float(values[-1]) ** (-n / (n - 1)):.6g}")
    frequencies = base ** (-torch.arange(n, dtype=torch.float64) / n)
    return frequencies if torch.allclose(values, frequencies, rtol=2.0**-20, atol=0.0) else None


@torch.no_grad()
def _filled(rebuilt: nn.Module, original: nn.Module) -> nn.Module | None:
    """`rebuilt` with the values of `original`; None where the two have other tensors.

    A buffer keeps its sharper value where it equals the original's to that one's rounding.
    """
    widen(rebuilt)
    tensors, given = _tensors(rebuilt), _tensors(original)
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in given.items()}:
        return None
    for name, tensor in tensors.items():
        value = given[name].detach()
        is_table = not isinstance(tensor, nn.Parameter) and _has_digits(tensor)
        if not (is_table and _has_digits(value) and _rounds_to(tensor, value)):
            tensor.copy_(value)
    return rebuilt


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _has_digits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _rounds_to(sharp: Tensor, value: Tensor) -> bool:
    step = 64 * torch.finfo(value.dtype).eps
    return torch.allclose(sharp, value.to(sharp), rtol=step, atol=step, equal_nan=True)


def _wide_batch(batch: Batch) -> Batch:
    widened: Batch = tree_map_only(Tensor, wide, batch)
    return widened


def main_output(output: Any) -> Tensor | None:
    """The tensor of a model's output that is compared: logits, else the last hidden state, else the first
    floating-point tensor that is no scalar.
    """
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    leaves = [t for t in tree_leaves(_as_tree(output)) if isinstance(t, Tensor) and t.is_floating_point()]
    return next((t for t in leaves if t.ndim > 1), leaves[0] if leaves else None)


def _as_tree(output: Any) -> Any:
    if isinstance(output, Mapping):
        return list(output.values())
    if not isinstance(output, Tensor | list | tuple | dict) and hasattr(output, "__dict__"):
        return list(vars(output).values())
    return output


def cotangent(output: Tensor) -> Tensor:
    """Fixed random gradient of an output: entry i depends on its place counted from the front of each axis.

    So two outputs of which one has more columns (a padded vocabulary) get the same in what they share.
    """
    total = torch.zeros((), dtype=torch.float64)
    for axis, size in enumerate(output.shape):
        phase = torch.arange(size, dtype=torch.float64) * (2.399963 + 0.7310585 * axis) + 1.0
        shape = [1] * output.ndim
        shape[axis] = size
        total = total + (phase.sin() * 1000 * (axis + 1)).reshape(shape)
    return total.sin().to(output)


def _plain_names(model: nn.Module) -> Iterator[tuple[str, str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return ((plain, names[id(p)]) for plain, p in named_parameters(model))
