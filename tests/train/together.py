"""Script that test_parallel.py starts with torchrun: `together.py ddp|fsdp FOLDER NAME…`."""

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
PARALLEL = sys.argv[1] if __name__ == "__main__" else ""


class Stop(Exception):
    """The run ends here, as if it had been killed in every process at once."""


def sharded(model: nn.Module) -> bool:
    """Whether the weights are spread over the processes."""
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def stop(trial: Trial) -> None:
    """An observer that ends the run."""
    if trial.step == STOP:
        raise Stop


def train(config: RunConfig, folder: Path, processes: Processes, *observers: object) -> None:
    """Train to the end and write the model."""
    options = {
        "folder": folder,
        "resume": True,
        "processes": processes,
    }
    with prepared(config, observers=observers, **options) as run:
        assert sharded(run.trial.bare_model) == (PARALLEL == "fsdp" and processes.size > 1)
        run.go()
        model = whole_model(run)
        if model is not None:
            write_model(model, folder / "model")


def main(folder: Path, names: list[str]) -> None:
    """Each config at a stretch, and in two runs."""
    with joined(PARALLEL, "cpu") as processes:
        assert processes.size == 2
        for name in names:
            config = RunConfig.from_dict(COMMON | CONFIGS[name])
            train(config, folder / name / "whole", processes)
            try:
                train(config, folder / name / "resumed", processes, stop)
            except Stop:
                train(config, folder / name / "resumed", processes)


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3:])
