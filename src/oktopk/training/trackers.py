"""Where scalars go besides the run directory: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from oktopk.errors import ConfigError
from oktopk.training.config import TrainConfig
from oktopk.training.run_directory import RunDirectory


class Tracker(Protocol):
    """Takes named scalars of one step or epoch."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def make_trackers(config: TrainConfig, run: RunDirectory, resumed_at: int) -> list[Tracker]:
    """The trackers a configuration asks for."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(run, resumed_at))
    if config.wandb is not None:
        trackers.append(WeightsAndBiases(config, run))
    if config.mlflow is not None:
        trackers.append(MLflow(config, run))
    return trackers


class TensorBoard:
    """Events under `tensorboard/` of the run."""

    def __init__(self, run: RunDirectory, resumed_at: int) -> None:
        module = _needed("torch.utils.tensorboard", "trainer")
        # What a killed run logged after its last checkpoint is hidden: it is logged again.
        self._writer: Any = module.SummaryWriter(str(run.tensorboard), purge_step=resumed_at or None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run in a W&B project, continued under the same name."""

    def __init__(self, config: TrainConfig, run: RunDirectory) -> None:
        module = _needed("wandb", "tracking")
        self._run: Any = module.init(
            project=config.wandb, name=run.path.name, id=run.path.name, resume="allow", dir=str(run.path),
            config=config.to_json(),
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """One run in an MLflow experiment."""

    def __init__(self, config: TrainConfig, run: RunDirectory) -> None:
        self._module: Any = _needed("mlflow", "tracking")
        self._module.set_experiment(config.mlflow)
        self._module.start_run(run_name=run.path.name)
        self._module.log_params(config.to_json())

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics({name.replace("/", "."): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._module.end_run()


def _needed(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} is not installed ({error}): pip install 'oktopk[{extra}]', or turn it off."
        ) from None
