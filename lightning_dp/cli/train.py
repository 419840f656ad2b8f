"""``lightning-dp-train``: trains a LightningModule as the configuration says and prints what it took."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from lightning_dp.callbacks import SafeRequeue
from lightning_dp.cli.one_line_errors import one_line_errors
from lightning_dp.config import config_directory, drop_unused_arguments, register_configs, save_config
from lightning_dp.insight.run_report import RunReport
from lightning_dp.strategy import BucketedDDPStrategy

KIB = 1024

register_configs()


def train(cfg: DictConfig) -> dict[str, float]:
    """Builds what ``cfg`` describes, trains and tests it.

    Args:
        cfg: Composed from ``conf/train.yaml``.

    Returns:
        The metrics of training and test.
    """
    overrides = HydraConfig.get().overrides.task
    strategy = instantiate(cfg.strategy)
    seed_everything(cfg.seed, workers=True, verbose=False)
    data: LightningDataModule = instantiate(drop_unused_arguments(cfg, "data", overrides))
    model: LightningModule = instantiate(drop_unused_arguments(cfg, "model", overrides))
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=strategy,
        callbacks=callbacks,
        logger=[instantiate(logger) for logger in cfg.logger.values()],
    )
    if trainer.is_global_zero:
        save_config(cfg, Path(cfg.output_dir))

    stopped = next((callback.checkpoint for callback in callbacks if isinstance(callback, SafeRequeue)), None)
    trainer.fit(model, data, ckpt_path=stopped or cfg.ckpt_path)
    metrics = dict(trainer.callback_metrics)
    if cfg.test:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        trainer.test(model, data, ckpt_path=best or None, verbose=False)
        metrics.update(trainer.callback_metrics)
    results = {name: float(value) for name, value in metrics.items()}
    if trainer.is_global_zero:
        console = Console()
        console.print(_summary(trainer, results, cfg.metric))
        console.print(f"logs, checkpoints and config.yaml: {cfg.output_dir}", soft_wrap=True)
    return results


def _summary(trainer: Trainer, results: Mapping[str, float], metric: str) -> Table:
    rows = {metric: f"{results[metric]:.4f}" if metric in results else "was not logged"}
    if isinstance(trainer.strategy, BucketedDDPStrategy):
        rows.update(_communication(trainer.strategy.report()))
    else:
        rows.update({"optimizer steps": f"{trainer.global_step:,}", "world size": f"{trainer.world_size}"})
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _communication(report: RunReport) -> dict[str, str]:
    formula = report.formula_bytes_per_step
    ratio = f", {report.bytes_per_step / formula:.4f} x" if formula else ""
    predicted = report.predicted_exposed_seconds
    forecast = f", predicted {predicted * 1e3:.1f} ms" if predicted is not None else ""
    return {
        "optimizer steps": f"{report.steps:,}",
        "skipped steps": f"{report.skipped_steps:,}",
        "samples seen": f"{report.count:,}",
        "world size": f"{report.world_size}",
        "sent per step": f"{report.bytes_per_step / KIB:,.1f} KiB a rank (ring formula {formula / KIB:,.1f}{ratio})",
        "messages per step": f"{report.messages_per_step:.0f} (buckets {report.buckets}, and the ballot)",
        "exposed communication": (
            f"{report.exposed_seconds * 1e3:.1f} ms a step (backward {report.backward_seconds * 1e3:.1f} ms{forecast})"
        ),
    }


@hydra.main(version_base="1.3", config_path=str(config_directory()), config_name="train")
def _program(cfg: DictConfig) -> float | None:
    with one_line_errors():
        # Sweepers optimise what a program returns.
        return train(cfg).get(cfg.metric)


def main() -> None:
    """Entry point of the command."""
    # A class of the user's own is looked for where the command is run, as `python -m` does.
    sys.path.insert(0, os.getcwd())
    with one_line_errors():
        _program()


if __name__ == "__main__":
    main()
