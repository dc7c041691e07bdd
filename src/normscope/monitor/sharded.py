"""Models whose weights are sharded over processes, by FSDP2 or FSDP1, watched without communication.

One process cannot run such a model alone, and where all ran it together, one that failed would leave the
others waiting. So the model is read on a replica, and the hooks go on the real modules of the same paths. A
wrong value is not replayed; the first figure that shows it is named.

Gradients and weights are those of a rank's shard. A row holds their norms, scaled where several ranks hold
the same values, so that the squares of all ranks' figures add up to the square of the whole model's, see
`row.PARTS`.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from normscope.anatomy import Anatomy
from normscope.anatomy.names import named_parameters
from normscope.capture.alone import alone, num_processes
from normscope.capture.apart import apart
from normscope.errors import describe
from normscope.monitor.alarms import is_measured
from normscope.monitor.alarms.columns import Floats
from normscope.monitor.attention import AttentionWatch
from normscope.monitor.groups import Groups, groups_of
from normscope.monitor.plan import Plan, plan_of
from normscope.monitor.reductions import local
from normscope.monitor.replica import FSDP1, cast_of, handles, is_a, never_called, replica_of, wholes
from normscope.monitor.wrong import held, words
from normscope.monitor.wrong.types import Replay, kind_of
from normscope.subjects import Batch

NO_REPLAY = " The step was not replayed, because one process cannot run a sharded model alone."


def is_sharded(model: nn.Module) -> bool:
    """Whether some of the model's weights are spread over processes."""
    if any(is_a(each, FSDP1) for each in model.modules()):
        return True
    return any(isinstance(p, DTensor) or hasattr(p, "_is_flat_param") for p in model.parameters())


class Sharded:
    """A sharded model. Make it outside of a forward, in which FSDP2 puts other parameters in its modules.

    Args:
        model: the model, without wrappers besides those of FSDP.

    Attributes:
        cast: dtype in which FSDP runs the model, None for that of its weights.
        note: sentence on what its figures are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = dict(named_parameters(model, remove_duplicate=False))
        self._wholes, self._handles = wholes(model), handles(model)
        self.cast = cast_of(model)
        self.note = (
            f"the weights are sharded over {num_processes()} processes: figures of gradients and weights are "
            "of each process's shard, and the squares of their norms add up to the whole model's"
        )

    def read(self, batch: Batch) -> tuple[Plan, AttentionWatch]:
        """Read the model on a replica: the plan, with this rank's shards, and the attentions."""
        with apart(self._model, None), alone(), never_called(self._model):
            replica, mode = replica_of(self._model, self._wholes)
            batch = self._uncast(batch)
            if mode is None:
                return self._read(replica, batch)
            with mode:
                return self._read(replica, tree_map_only(Tensor, mode.from_tensor, batch))

    def _uncast(self, batch: Batch) -> Batch:
        """The batch in the precision of the weights, from which FSDP may have cast both."""
        dtypes = {whole.dtype for whole in self._wholes.values()}
        if self.cast is None or len(dtypes) > 1:
            return batch
        (dtype,) = dtypes
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.dtype == self.cast else t, batch)

    def _read(self, replica: nn.Module, batch: Batch) -> tuple[Plan, AttentionWatch]:
        try:
            plan = plan_of(replica, batch)
        except Exception as error:  # the taps could not be found
            note = f"no stream is watched, because the model could not be read ({describe(error)})"
            nothing = Anatomy(())
            plan = Plan(nothing, (), (), {}, {}, groups_of(replica, nothing), (note,))
        watch = AttentionWatch(replica, plan.anatomy, batch)
        watch.move_to(self._model)
        groups = self._of_shards(plan.groups, plan.anatomy)
        return dataclasses.replace(plan, groups=groups, notes=(*plan.notes, self.note)), watch

    def _of_shards(self, whole: Groups, anatomy: Anatomy) -> Groups:
        """The groups with this rank's shards as parameters."""
        if all(name in self._parameters for name in whole.names):
            shards = tuple(self._parameters[name] for name in whole.names)
            sizes = np.array([max(1, p.numel()) for p in whole.parameters])
            groups = dataclasses.replace(whole, parameters=shards, sizes=sizes)
        else:  # flat parameters of FSDP1
            groups = groups_of(self._model, anatomy)
        return dataclasses.replace(groups, shares=np.array([self._share(p) for p in groups.parameters]))

    def _share(self, parameter: nn.Parameter) -> float:
        """One over the number of ranks that hold the same values."""
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            axes = enumerate(parameter.placements)
            return 1 / math.prod(mesh.size(axis) for axis, placement in axes if placement.is_replicate())
        for handle in self._handles:  # of FSDP1
            flat = handle.flat_param
            if handle.uses_sharded_strategy and any(parameter is p for p in (flat, *(flat._params or ()))):
                return float(handle.process_group.size() / num_processes())
        if (whole := getattr(parameter, "_padded_unsharded_size", None)) is not None:  # of a wrapper outside
            own: Any = parameter
            return float(whole.numel() / (own._sharded_size.numel() * num_processes()))
        return 1 / num_processes()

    def first_wrong(
        self, where: str, replay: Replay, plan: Plan, rms: Floats, gradients: Floats | None
    ) -> dict[str, Any]:
        """The first wrong figure of a step on this rank, in the order of the step, as data of an event.

        Args:
            where: what was seen to be wrong.
            replay: the step's forward.
            plan: its plan.
            rms: [streams] RMS of each.
            gradients: [parameters] squares of their norms; None before the backward.
        """
        found = held.wrong_in_data(self._model, replay.args, replay.kwargs) or self._wrong_in_shards(replay)
        if found is not None:
            data = {"module": found.module, "phase": found.phase, "kind": found.kind, "tensor": found.name}
            return data | {"sentence": words.of_held(found, "")}
        sites = [stream for stream, _ in plan.of("stream")]
        bad = np.flatnonzero(is_measured(rms) & ~np.isfinite(rms))
        if len(bad):
            first = int(bad[0])
            before = f", that at {sites[first - 1].site} is finite" if first else ""
            sentence = (
                f"The first stream that is not finite on this rank is that at {sites[first].site}{before}."
            )
            return {"module": sites[first].place.module, "phase": "forward", "sentence": sentence + NO_REPLAY}
        if any(kind_of(each) is not None for each in replay.cotangents or () if each is not None):
            sentence = "The streams are finite on this rank, the gradient of the loss by the outputs is not."
            return {"module": "", "phase": "loss", "sentence": sentence + NO_REPLAY}
        wrong = [] if gradients is None else np.flatnonzero(~np.isfinite(gradients)).tolist()
        if gradients is not None and wrong:
            last = plan.groups.names[wrong[-1]]
            sentence = (
                f"The streams are finite on this rank, the gradients of {len(wrong)} of {len(gradients)} "
                f"parameters are not, the last that of {last}. The backward made that, or another rank did."
            )
            return {"phase": "backward", "sentence": sentence + NO_REPLAY}
        return {"sentence": f"{where} is not finite on this rank, all other figures are.{NO_REPLAY}"}

    def _wrong_in_shards(self, replay: Replay) -> held.Held | None:
        """The first parameter, or optimizer state, with a wrong value in this rank's shard."""
        names = {id(p): name for name, p in self._parameters.items()}
        owned = [(f"{name}, this rank's shard,", held.owner(name), p) for name, p in self._parameters.items()]
        states = [
            (f"{key} of {names[id(p)]}, this rank's shard,", held.owner(names[id(p)]), value)
            for optimizer in replay.optimizers
            for p, state in optimizer.state.items()
            for key, value in (state.items() if id(p) in names else ())
            if isinstance(value, Tensor)
        ]
        for phase, tensors in (("parameter", owned), ("optimizer state", states)):
            found = held.first_in(phase, [(name, path, local(tensor)) for name, path, tensor in tensors])
            if found is not None:
                return found
        return None
