"""Intake of the objects of training libraries: what `normscope.check` takes besides modules and Subjects."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from normscope.errors import UsageError
from normscope.recording.own_loop import run_of_loop
from normscope.subjects import Run
from normscope.subjects.rng import generators_kept


def as_run(given: Any) -> Any:
    """The Run of a Trainer of transformers, or of a LightningModule with its data; anything else as it is.

    Raises:
        UsageError: the object has no data, or its loss cannot be recorded.
    """
    transformers = sys.modules.get("transformers.trainer")  # whoever made a Trainer has imported it
    if transformers is not None and isinstance(given, transformers.Trainer):
        return run_of_trainer(given)
    if isinstance(given, tuple) and len(given) == 2 and _is_lightning(given[0]):
        return run_of_lightning(*given)
    return given


def run_of_trainer(trainer: Any) -> Run:
    """The Run of a `transformers.Trainer` or one of TRL: its own loader, loss, optimizer and schedule.

    The trainer is left as it was: an optimizer and a scheduler that are made here do not stay in it.
    """
    args, model = trainer.args, trainer.model
    name = f"{type(trainer).__name__} of {type(model).__name__}"
    if trainer.train_dataset is None:
        raise UsageError(
            f"{name} without train_dataset", "a trainer that can train", "give it a train_dataset"
        )
    before = trainer.optimizer, trainer.lr_scheduler
    with generators_kept():
        loader = trainer.get_train_dataloader()
        try:
            trainer.create_optimizer_and_scheduler(num_training_steps=_num_steps(args, loader))
            optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        finally:
            trainer.optimizer, trainer.lr_scheduler = before

        parts = args.gradient_accumulation_steps

        def loss_of(item: tuple[Any, Any]) -> Any:
            inputs, num_labels = item
            counted = {} if num_labels is None else {"num_items_in_batch": num_labels}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, trainer._prepare_inputs(inputs), **counted)
            # A loss over the labels of all batches of a step is a share of it, and a step takes the mean.
            return loss * parts if counted and parts > 1 and _is_share(trainer) else loss

        return run_of_loop(
            _Counted(trainer, loader),
            loss_of,
            model,
            name,
            optimizer=optimizer,
            scheduler=scheduler,
            clip=args.max_grad_norm or None,
            precision="bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            accumulation=parts,
        )


@dataclass(frozen=True)
class _Counted:
    """Batches of a trainer's loader, each with the number of labels in its step, which the trainer counts."""

    trainer: Any
    loader: Any

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        args, rest = self.trainer.args, iter(self.loader)
        while True:
            batches, count = self.trainer.get_batch_samples(
                rest, args.gradient_accumulation_steps, args.device
            )
            if not batches:
                return
            yield from ((batch, count) for batch in batches)


def _is_share(trainer: Any) -> bool:
    """Whether the trainer's loss of one batch is divided by the labels of all batches of its step."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _num_steps(args: Any, loader: Any) -> int:
    if args.max_steps > 0:
        return int(args.max_steps)
    batches = len(loader) if hasattr(loader, "__len__") else 1
    return math.ceil(max(1, batches // args.gradient_accumulation_steps) * args.num_train_epochs)


def run_of_lightning(module: Any, data: Any) -> Run:
    """The Run of a LightningModule with its LightningDataModule, or an iterable of batches.

    It has the module's `training_step` and `configure_optimizers`. A scheduler whose interval is an epoch
    does not step in a trial.

    Raises:
        UsageError: it steps its optimizers by itself, or has none or several.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{name} with manual optimisation",
            "automatic optimisation",
            "check its script as it is: normscope check -- python train.py",
        )
    with generators_kept():
        if hasattr(data, "train_dataloader"):
            data.prepare_data()
            data.setup("fit")
            data = data.train_dataloader()
        if not isinstance(data, Iterable):
            given = f"{name} with data of type {type(data).__name__}"
            raise UsageError(given, "a LightningDataModule or a DataLoader", "give (module, datamodule)")
        optimizers, schedulers = _configured(module)

        def loss_of(batch: Any) -> Any:
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            result = module.training_step(batch, 0)
            return result["loss"] if isinstance(result, dict) else result

        return run_of_loop(data, loss_of, module, name, optimizer=optimizers, scheduler=schedulers)


def _configured(module: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers of `configure_optimizers`, in each of the forms that Lightning takes."""
    made = module.configure_optimizers()
    schedulers: Sequence[Any] = ()
    if isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], tuple | list):
        made, schedulers = made
    each = [one if isinstance(one, dict) else {"optimizer": one} for one in _several(made)]
    optimizers = [one["optimizer"] for one in each]
    plans = [*_several(schedulers), *(one["lr_scheduler"] for one in each if "lr_scheduler" in one)]
    stepped = [
        plan["scheduler"] for plan in plans if isinstance(plan, dict) and plan.get("interval") == "step"
    ]
    return optimizers, stepped


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _is_lightning(value: Any) -> bool:
    kinds = {kind.__name__ for kind in type(value).__mro__}
    return isinstance(value, nn.Module) and "LightningModule" in kinds
