"""Lightning's Trainer: a callback that watches the run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]

from normscope.errors import UsageError
from normscope.monitor.clients.watched import LOG, WatchedRun
from normscope.monitor.monitor import EVERY, Monitor


class MonitorCallback(Callback):
    """Callback that watches a Lightning run with a `Monitor`.

        trainer = lightning.Trainer(callbacks=[MonitorCallback(store="run.db")])
        trainer.fit(module, loader)

    The loss of a step is the sum of what is differentiated in it, in this process. With automatic
    optimization the gradients are measured before clipping. A run resumed from a checkpoint goes on in its
    store.

    Args:
        store: SQLite file to write, for `normscope watch`.
        every: steps between two looks at all figures.
        module: path in the LightningModule of the model to watch, such as "model"; None watches the first
            module that a training step calls and that holds at least half of the trained parameters.
        options: other arguments of `Monitor`.
    """

    def __init__(
        self, store: str | Path | None = None, every: int = EVERY, module: str | None = None, **options: Any
    ) -> None:
        self._run = WatchedRun(store=store, every=every, **options)
        self._module = module
        self._seekers: list[Any] = []
        self._step = 0

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the run that goes on, or of the last one; None before its first forward."""
        return self._run.monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch, or to seek the model."""
        self._step = trainer.global_step
        if self._module is not None:
            try:
                model = pl_module.get_submodule(self._module)
            except AttributeError as error:
                names = ", ".join(name for name, _ in pl_module.named_children()) or "none"
                raise UsageError(
                    f'module="{self._module}"', f"the path of a module, such as one of {names}", "name one"
                ) from error
            self._run.begin(model, trainer.optimizers, self._step, trainer.max_steps)
            return
        least = _num_trained(pl_module) / 2
        for module in pl_module.modules():
            if (count := _num_trained(module)) and count >= least:
                hook = self._seeker(trainer, pl_module)
                self._seekers.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _seeker(self, trainer: Any, pl_module: Any) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            # Under DDP the LightningModule's forward is its training step for a while.
            is_redirected = module is pl_module and "forward" in vars(module)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_redirected:
                self._end_seeking()
                self._run.begin(module, trainer.optimizers, self._step, trainer.max_steps)
                assert self.monitor is not None
                self.monitor.begin_forward(args, kwargs)  # its own hook comes too late for this call

        return hook

    def _end_seeking(self) -> None:
        for handle in self._seekers:
            handle.remove()
        self._seekers = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Add up losses."""
        self._run.differentiates(loss, getattr(trainer.precision_plugin, "scaler", None))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measure the gradients before they are clipped."""
        if self.monitor is not None:
            self.monitor.see_gradients()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step, where an optimizer has stepped in this batch."""
        if self._seekers:
            self._end_seeking()
            LOG.warning(
                "the run is not watched: no module that the training step calls holds half of the trained "
                "parameters; name the model by MonitorCallback(module=…)"
            )
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._run.step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run for an error."""
        self._end_seeking()
        self._run.end(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._end_seeking()
        self._run.end()


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
