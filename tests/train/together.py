"""Script that test_parallel.py starts with torchrun: `together.py FOLDER ddp:NAME,NAME fsdp:NAME`."""

import sys
from pathlib import Path

from torch import nn
from torch.distributed.tensor import DTensor

from normscope.train import RunConfig, Trial
from normscope.train.finish import whole_model, write_model
from normscope.train.prepare import prepared
from normscope.train.processes import Processes, joined

STOP = 2
COMMON = {
    "steps": 4,
    "validate_every": 2,
    "checkpoint_every": STOP,
    "lr": 1e-2,
    "batch_size": 4,
    "seq_len": 16,
}
SIZES = "depth=2,width=16,heads=2,context=32"
CONFIGS = {
    "tied": {"model": f"nn:decoder,{SIZES},tie=true", "accumulation": 2, "schedule": "cosine", "clip": 0.5},
    "masked": {"model": f"nn:encoder,{SIZES},scheme=post", "optimizer": "adam"},
    "sphere": {"model": f"nn:decoder,{SIZES},scheme=ngpt", "precision": "bfloat16"},
    "momentum": {"model": f"nn:decoder,{SIZES},scheme=deepnorm", "optimizer": "sgd", "lr": 0.1},
}
CONFIGS["halves"] = {
    "model": f"{Path(__file__).with_name('halves.py')}:build",
    "validation": 0.0,
    "accumulation": 2,
}


class Stop(Exception):
    """Raised to end the run, as if every process had been killed at once."""


def sharded(model: nn.Module) -> bool:
    """Whether the weights are sharded over the processes."""
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def stop(trial: Trial) -> None:
    """An observer that ends the run."""
    if trial.step == STOP:
        raise Stop


def train(
    config: RunConfig, folder: Path, processes: Processes, *observers: object, is_sharded: bool = False
) -> None:
    """Train to the end and write the model."""
    options = {
        "folder": folder,
        "resume": True,
        "processes": processes,
    }
    with prepared(config, observers=observers, **options) as run:
        assert sharded(run.trial.bare_model) == is_sharded
        run.go()
        model = whole_model(run)
        if model is not None:
            write_model(model, folder / "model")


def main(folder: Path, jobs: list[str]) -> None:
    """Train each config in one run, and in two."""
    with joined("ddp", "cpu") as processes:  # once: torchrun's store hangs where the same process joins again
        assert processes.size == 2
        for job in jobs:
            parallel, names = job.split(":")
            processes._parallel = parallel  # type: ignore[attr-defined]
            for name in names.split(","):
                config, here = RunConfig.from_dict(COMMON | CONFIGS[name]), folder / parallel / name
                is_sharded = parallel == "fsdp"
                train(config, here / "whole", processes, is_sharded=is_sharded)
                try:
                    train(config, here / "resumed", processes, stop, is_sharded=is_sharded)
                except Stop:
                    train(config, here / "resumed", processes, is_sharded=is_sharded)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
