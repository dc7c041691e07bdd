"""Gradient at each block and each kind of weight, and the share that norms erase.

One forward and one backward of the loss, in eval mode; without a loss, of a random linear functional of the
output.

    gradient/stream       ‖∂loss/∂H‖₂ of the stream H at every block's exit, and at "<stack>.input"
    gradient/block        ‖∂loss/∂θ‖₂ over the parameters θ of a block
    gradient/total        the same over all parameters, at ""
    gradient/q, k, v, o, up, gate, down    RMS of ∂loss/∂W over the weights W of a kind, at every branch
    gradient/erased       share of ‖∂loss/∂y‖² in the left kernel of the Jacobian of the norm with output y:
                          its backward sets that share to zero (`normscope.linalg.left_kernel_share`)
    branch/zero-output    1 where the term that is added is zero, or every output projection is; else 0
    branch/trainable      1 where any parameter of the branch gets a non-zero gradient, else 0

and the rows of `wiring.starved`, which need the same backward.

Sums are in float64, over gradients in the model's own precision. Frozen parameters count only where all are
frozen.
"""

from collections.abc import Iterator

from torch import nn

from normscope.anatomy import Anatomy, Block, Branch, Norm, Site, capture, measuring
from normscope.linalg import left_kernel_share
from normscope.probes.added import added, sites_of_added
from normscope.probes.backward import Backward, is_fused
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.norms import TOKENWISE, factor, normalised, norms_of
from normscope.probes.objective import everything_requires_grad, objective, objective_how
from normscope.probes.parameters import Parameters
from normscope.probes.rows import UNDEFINED, at, row, value_row
from normscope.probes.sums import energy, is_zero, norm
from normscope.probes.wiring.starved import clip_rows, starved_rows
from normscope.subjects import Subject, untouched

ROLES = ("q", "k", "v", "o", "up", "gate", "down")
OUTPUT_ROLES = ("o", "down")


def measure_gradient(subject: Subject, anatomy: Anatomy) -> list[Measurement]:
    """Gradients of the loss on the fixed batch by block, weight, norm and branch; rows in forward order."""
    model, batch = subject.model, subject.batch
    parameters = Parameters(model, anatomy)
    norms = norms_of(anatomy)
    differentiated = [stack.blocks[0].entry for stack in anatomy.stacks]
    differentiated += [block.exit for block in anatomy.blocks] + [norm.output for norm in norms.values()]
    with untouched(model), measuring(model), everything_requires_grad(model, batch):
        loss, captured = capture(model, lambda: objective(subject), [*differentiated, *_looked_at(anatomy)])
        backward = Backward(loss, captured, anatomy, parameters, differentiated)
        loss = loss.detach()
        del captured
        wiring = [
            *starved_rows(subject, anatomy, parameters, backward, loss),
            *clip_rows(subject, parameters, backward),
        ]
    how = objective_how(subject)
    if parameters.are_frozen:
        how += "; every parameter is frozen, so all are counted"
    return [*_Rows(anatomy, parameters, backward, how), *wiring]


def _looked_at(anatomy: Anatomy) -> Iterator[Site]:
    """Sites whose tensor or graph is needed."""
    yield from (norm.input for norm in norms_of(anatomy).values())
    yield from (block.entry for block in anatomy.blocks)
    for branch in anatomy.branches:
        yield from (branch.entry, *sites_of_added(branch))
        yield from (projection.output for projection in branch.projections)
        yield from (site for a in branch.attention for site in (a.query, a.key, a.value))


class _Rows:
    """The table, in the order of the forward."""

    def __init__(self, anatomy: Anatomy, parameters: Parameters, backward: Backward, how: str) -> None:
        self.anatomy, self.parameters, self.backward, self.how = anatomy, parameters, backward, how
        self._by_id = {id(parameter): parameter for parameter in parameters.all()}

    def __iter__(self) -> Iterator[Measurement]:
        yield self._norm_row("gradient/total", "", self.parameters.trained(), self.how)
        for stack in self.anatomy.stacks:
            entering = self.backward.at(stack.blocks[0].entry)
            yield row("gradient/stream", f"{stack.name}.input", entering, norm, self.how)
            for block in stack.blocks:
                yield from self._of_block(block)
        for site, found in norms_of(self.anatomy).items():
            yield self._erased(site, found)

    def _of_block(self, block: Block) -> Iterator[Measurement]:
        how = self.how + self.parameters.sharing(block)
        yield row("gradient/stream", block.site, self.backward.at(block.exit), norm, self.how)
        yield self._norm_row("gradient/block", block.site, self.parameters.of_block(block), how)
        for branch in block.branches:
            for role in ROLES:
                yield from self._of_role(role, branch, how)
            yield self._zero_output(branch)
            yield self._trainable(branch, how)

    def _norm_row(self, quantity: str, site: str, parameters: list[nn.Parameter], how: str) -> Measurement:
        if not parameters:
            return not_measured(quantity, site, "no parameter here is trained")
        gradients = self.backward.of_all(parameters)
        if not gradients:
            return not_measured(quantity, site, self.backward.no_gradient)
        return value_row(quantity, site, sum(map(energy, gradients)) ** 0.5, how)

    def _of_role(self, role: str, branch: Branch, how: str) -> Iterator[Measurement]:
        """RMS over the weights of one role, pooled over the projections that make it (experts)."""
        squares, count, remark = 0.0, 0, ""
        projections = [projection for projection in branch.projections if role in projection.roles]
        for projection in projections:
            weight = self.parameters.by_name.get(projection.parameter)
            gradient = None if weight is None else self.backward.of(weight)
            if weight is None or gradient is None:
                continue
            if is_fused(branch, projection):
                mask = self.backward.masks.get(projection, {}).get(role)
                if mask is None:
                    remark = f"; over the whole fused weight of {'+'.join(projection.roles)}"
                else:
                    gradient = gradient.movedim(projection.feature_axis, 0)[mask]
            squares, count = squares + energy(gradient), count + gradient.numel()
        quantity = f"gradient/{role}"
        if count:
            yield value_row(quantity, branch.site, (squares / count) ** 0.5, how + remark)
        elif projections:
            yield not_measured(quantity, branch.site, self.backward.no_gradient)

    def _zero_output(self, branch: Branch) -> Measurement:
        weights = [
            self.parameters.by_name[projection.parameter]
            for projection in branch.projections
            if set(projection.roles) & set(OUTPUT_ROLES) and projection.parameter in self.parameters.by_name
        ]
        if weights and all(map(is_zero, weights)):
            how = "exact: every output projection is zero"
            return Measurement("branch/zero-output", branch.site, 1.0, how=how)
        term = added(branch, self.backward.captured)
        return row("branch/zero-output", branch.site, term, lambda term: float(is_zero(term)), EXACT)

    def _trainable(self, branch: Branch, how: str) -> Measurement:
        quantity, learnt = "branch/trainable", self.backward.learnt.get(branch.site)
        if learnt is None:
            return not_measured(quantity, branch.site, "this forward did not compute the branch's output")
        if not learnt:
            return not_measured(quantity, branch.site, "no parameter of the branch is trained")
        if self.backward.failure is not None:
            return not_measured(quantity, branch.site, self.backward.failure)
        parameters = [self._by_id[key] for key in learnt if key in self._by_id]
        moves = any(not is_zero(gradient) for gradient in self.backward.of_all(parameters))
        return value_row(quantity, branch.site, float(moves), how)

    def _erased(self, site: str, found: Norm) -> Measurement:
        quantity = "gradient/erased"
        gradient, entering = self.backward.at(found.output), at(self.backward.captured, found.input)
        if isinstance(gradient, str):
            return not_measured(quantity, site, gradient)
        if isinstance(entering, str):
            return not_measured(quantity, site, entering)
        if found.kind not in TOKENWISE:
            return not_measured(quantity, site, f"a {found.kind} mixes tokens: no Jacobian per token")
        if is_zero(gradient):
            return not_measured(quantity, site, UNDEFINED)
        gamma = factor(found, self.parameters.by_name)
        if gamma is not None and gamma.numel() == 1:  # ScaleNorm's one gain
            gamma = gamma.reshape(()).expand(gradient.shape[-1])
        if entering.numel() != gradient.numel() or (gamma is not None and gamma.shape != gradient.shape[-1:]):
            return not_measured(quantity, site, "the norm does not run over the last axis")
        entering = entering.reshape(gradient.shape)  # (B·T, d) directly behind a matmul
        centred = found.kind == "layernorm"
        share = left_kernel_share(gradient, normalised(found, entering), gamma, centred)
        return value_row(quantity, site, float(share), self.how)
