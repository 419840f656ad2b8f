"""The config files: every choice works, every key is explained, a wrong setting ends in one line."""

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import BucketedDDPStrategy, SafeRequeue
from lightning_dp.cli.train import main
from lightning_dp.config import BucketedDDPConfig, config_directory, drop_unused_arguments, register_configs
from lightning_dp.demo.convnet import DigitsNet
from lightning_dp.demo.digits import DigitsDataModule
from lightning_dp.monitor import DataParallelMonitor

CONF = config_directory()
# Every file of every group, with what its config is an instance of; a group of several objects holds them by name.
CHOICES: dict[tuple[str, str], Any] = {
    ("callbacks", "checkpoint"): {"best_checkpoint": ModelCheckpoint, "last_checkpoint": ModelCheckpoint},
    ("callbacks", "default"): {
        "best_checkpoint": ModelCheckpoint,
        "last_checkpoint": ModelCheckpoint,
        "progress_bar": TQDMProgressBar,
        "safe_requeue": SafeRequeue,
    },
    ("callbacks", "monitor"): {"data_parallel_monitor": DataParallelMonitor},
    ("callbacks", "none"): {},
    ("callbacks", "requeue"): {"safe_requeue": SafeRequeue},
    ("callbacks", "progress_bar"): {"progress_bar": TQDMProgressBar},
    ("data", "digits"): DigitsDataModule,
    ("experiment", "quick"): None,  # no object of its own
    ("logger", "csv"): {"csv": CSVLogger},
    ("logger", "default"): {"csv": CSVLogger, "tensorboard": TensorBoardLogger},
    ("logger", "none"): {},
    ("logger", "tensorboard"): {"tensorboard": TensorBoardLogger},
    ("model", "digits_net"): DigitsNet,
    ("strategy", "bucketed_ddp"): BucketedDDPStrategy,
    ("strategy", "ddp"): DDPStrategy,
    ("trainer", "cpu"): Trainer,
    ("trainer", "gpu"): Trainer,
}
OPTIONS = {group: [c for g, c in CHOICES if g == group] for group, _ in CHOICES}
STRATEGY_KEYS = [name for name in inspect.signature(BucketedDDPStrategy).parameters if name != "kwargs"]


def composed(*overrides: str) -> DictConfig:
    """The program's configuration; it takes its folder from Hydra, which does not run here."""
    register_configs()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=["output_dir=here", *overrides])


# ---------------------------------------------------------------------------------------------- every choice


def test_the_table_of_choices_lists_every_file() -> None:
    files = {
        (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name not in ("bench", "launcher")
    }
    assert files == set(CHOICES)


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda name: name)
def test_every_choice_composes_and_its_objects_can_be_made(group: str, choice: str, tmp_path: Path) -> None:
    cfg = composed(f"{group}={choice}", f"output_dir={tmp_path}")
    if group == "trainer":
        if choice == "gpu" and not torch.cuda.is_available():
            assert (cfg.trainer.accelerator, cfg.trainer.devices) == ("gpu", "auto")
            return
        made = instantiate(cfg.trainer, devices=1, logger=False)
        assert (made.accumulate_grad_batches, made.max_epochs) == (1, 15)
    elif group == "experiment":
        assert isinstance(instantiate(cfg.strategy), BucketedDDPStrategy)
        made = instantiate(cfg.trainer, devices=1, logger=False)
        assert (made.accumulate_grad_batches, made.max_epochs) == (2, 2)
        return
    elif isinstance(CHOICES[group, choice], dict):
        made = {name: instantiate(node) for name, node in cfg[group].items()}
        assert {name: type(value) for name, value in made.items()} == CHOICES[group, choice]
        return
    else:
        made = instantiate(cfg[group])
    assert type(made) is CHOICES[group, choice]


def test_several_choices_of_a_group_add_up() -> None:
    assert list(composed("callbacks=[default,monitor]").callbacks) == [
        *CHOICES["callbacks", "default"],
        *CHOICES["callbacks", "monitor"],
    ]


def test_logs_and_checkpoints_go_into_the_run_folder(tmp_path: Path) -> None:
    cfg = composed(f"output_dir={tmp_path}")
    folders = [
        cfg.trainer.default_root_dir,
        instantiate(cfg.logger.csv).log_dir,
        instantiate(cfg.logger.tensorboard).log_dir,
        instantiate(cfg.callbacks.best_checkpoint).dirpath,
    ]
    assert all(Path(folder).is_relative_to(tmp_path) for folder in folders)


def test_a_group_can_be_replaced_by_a_class_of_the_users_own() -> None:
    overrides = ["model._target_=lightning.pytorch.demos.boring_classes.BoringModel"]
    overrides += ["data._target_=lightning.pytorch.demos.boring_classes.BoringDataModule"]
    cfg = composed(*overrides)
    # Neither class takes an argument.
    assert isinstance(instantiate(drop_unused_arguments(cfg, "model", overrides)), LightningModule)
    assert isinstance(instantiate(drop_unused_arguments(cfg, "data", overrides)), LightningDataModule)


# ---------------------------------------------------------------------------------------------- every key


def uncommented_settings(text: str) -> list[str]:
    """Keys that hold a value and have no comment on the line above; what is Hydra's own needs none."""
    lines, found = text.splitlines(), []

    def walk(node: yaml.Node) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if key.value in ("defaults", "hydra", "_target_"):
                continue
            if isinstance(value, yaml.MappingNode):
                walk(value)
            elif not lines[key.start_mark.line - 1].lstrip().startswith("#") or key.start_mark.line == 0:
                found.append(key.value)

    walk(yaml.compose(text))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Why.\na: 1\n", []),
        ("a: 1\n", ["a"]),
        ("a: 1\n# of the line above, at the end\n", ["a"]),
        ("# Why.\na: 1\nb: 2\n", ["b"]),
        ("# Why.\n\na: 1\n", ["a"]),
        ("# Why.\ntop:\n  _target_: x.Y\n  a: 1\n  # Why.\n  b: [1, 2]\n", ["a"]),
        ("defaults:\n  - _self_\nhydra:\n  job:\n    name: x\n# Why.\na: null\n", []),
    ],
)
def test_the_checker_of_comments_finds_a_key_without_one(text: str, expected: list[str]) -> None:
    assert uncommented_settings(text) == expected


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_key_has_a_comment_above_it(path: Path) -> None:
    assert uncommented_settings(path.read_text()) == []


# ---------------------------------------------------------------------------------------------- one set of defaults


def test_the_defaults_of_file_schema_and_class_agree() -> None:
    # The file by itself: composed, it would take what it lacks from the schema.
    file = yaml.safe_load((CONF / "strategy/bucketed_ddp.yaml").read_text())
    del file["defaults"]
    schema = OmegaConf.to_container(OmegaConf.structured(BucketedDDPConfig))
    assert schema.pop("_target_") == f"{BucketedDDPStrategy.__module__.split('.')[0]}.BucketedDDPStrategy"
    parameters = inspect.signature(BucketedDDPStrategy).parameters
    signature = {name: parameters[name].default for name in STRATEGY_KEYS}
    assert isinstance(signature["timeout"], timedelta)
    signature["timeout"] = signature["timeout"].total_seconds()
    assert file == schema == signature


def test_a_composed_strategy_is_checked_against_the_schema() -> None:
    assert OmegaConf.get_type(composed().strategy) is BucketedDDPConfig


# ---------------------------------------------------------------------------------------------- nonfinite: off


class NaNNet(LightningModule):
    """Its every gradient is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.weight * float("nan")).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def skipped_and_weight(rank: int, file: str) -> tuple[int, float]:
    """What one step on NaN gradients does under the settings in ``file``."""
    strategy = instantiate(OmegaConf.merge(OmegaConf.structured(BucketedDDPConfig), OmegaConf.create(file)))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    net = NaNNet()
    trainer.fit(net, DataLoader(TensorDataset(torch.zeros(1, 1))))
    return strategy.skipped_steps, net.weight.item()


def test_off_in_a_yaml_file_means_off_although_yaml_reads_it_as_a_boolean(pool) -> None:
    assert OmegaConf.create("nonfinite: off").nonfinite is False  # what makes this a trap
    [(skipped, weight)] = pool.run(1, skipped_and_weight, "nonfinite: off")
    assert skipped == 0
    assert weight != weight  # NaN: nobody looked
    assert pool.run(1, skipped_and_weight, "nonfinite: skip") == [(1, 1.0)]


def test_off_on_the_command_line_is_accepted() -> None:
    assert isinstance(instantiate(composed("strategy.nonfinite=off").strategy), BucketedDDPStrategy)


def test_a_function_that_counts_can_be_given_as_a_config() -> None:
    count = "strategy.count={_target_: lightning_dp.data.counts.equal, _partial_: true}"
    assert isinstance(instantiate(composed(count).strategy), BucketedDDPStrategy)


# ---------------------------------------------------------------------------------------------- wrong settings


@pytest.fixture
def failing_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Runs the program, which must end with exit code 2 before it launches a process; what it wrote to stderr."""

    def no_process(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a process was launched")

    def run(*overrides: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lightning-dp-train", *overrides])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert ended.value.code == 2
        assert output.out == ""
        return output.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    # The program changes these for its own process.
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0"))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
    GlobalHydra.instance().clear()
    return run


MISSPELT = {
    "strategy.bucket_cap=1": ("strategy", STRATEGY_KEYS),
    "model.hiden=8": ("model", ["channels", "dropout", "hidden", "learning_rate", "weight_decay"]),
    "data.batchsize=8": ("data", ["batch_size", "num_workers", "split_seed"]),
    "trainer.device=4": ("trainer", ["accelerator", "devices", "max_epochs", "accumulate_grad_batches"]),
    "callbacks.best_checkpoint.dir=x": ("callbacks.best_checkpoint", ["dirpath", "filename", "mode", "monitor"]),
    "logger.csv.dir=x": ("logger.csv", ["name", "save_dir"]),
    "seeds=1": ("the configuration", ["seed", "metric", "model", "data", "trainer", "strategy", "callbacks", "logger"]),
    "modle.hidden=8": ("the configuration", ["model"]),
    "modle=digits_net": ("the configuration", ["model"]),
}


@pytest.mark.parametrize("override", MISSPELT)
def test_a_misspelt_key_ends_in_one_line_with_the_keys_there_are(override: str, failing_run) -> None:
    parent, keys = MISSPELT[override]
    error = failing_run(override)
    wrong = override.split("=")[0] if parent != "the configuration" else override.split("=")[0].split(".")[0]
    assert error.startswith(f"configuration error: {wrong} is no key of {parent}; its keys are: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    listed = error.split("its keys are: ")[1].split(" (")[0].strip().split(", ")
    assert set(keys) <= set(listed)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # Of a wrong type.
        ("strategy.bucket_cap_mb=big", ["bucket_cap_mb must be a number above 0 or 'auto', got 'big'"]),
        ("strategy.bucket_cap_mb=null", ["bucket_cap_mb must be a number above 0 or 'auto', got None"]),
        ("strategy.first_bucket_cap_mb=big", ["strategy.first_bucket_cap_mb", "'big'", "Float"]),
        ("strategy.max_consecutive_skips=1.5", ["strategy.max_consecutive_skips", "'1.5'", "Integer"]),
        ("strategy.overlap=maybe", ["strategy.overlap", "'maybe'", "bool"]),
        ("strategy.timeout=[1]", ["strategy.timeout"]),
        # Out of range.
        ("strategy.bucket_cap_mb=-1", ["bucket_cap_mb must be a number above 0 or 'auto', got -1"]),
        ("strategy.bucket_cap_mb=nan", ["bucket_cap_mb must be a number above 0 or 'auto', got nan"]),
        ("strategy.first_bucket_cap_mb=0", ["first_bucket_cap_mb must be a number above 0, got 0.0"]),
        ("strategy.max_consecutive_skips=0", ["max_consecutive_skips must be a number above 0, got 0"]),
        ("strategy.timeout=0", ["timeout must be a number above 0, got 0.0"]),
        ("strategy.nonfinite=ignore", ["nonfinite='ignore' is not known", "skip", "raise", "off"]),
        ("strategy.nonfinite=true", ["nonfinite=True is not known", "skip", "raise", "off"]),
        ("strategy.count=words", ["count='words' is not known", "samples", "tokens", "equal"]),
        # An argument that the strategy does not take, added by force.
        ("+strategy.bucket_cap=1", ["no argument 'bucket_cap'", *STRATEGY_KEYS]),
        ("+strategy.process_group=x", ["process_group cannot be used with bucketed_ddp"]),
        # A class that there is not.
        ("model._target_=no_such_module.Net", ["no_such_module.Net"]),
        # No override at all.
        ("strategy", ["'strategy'"]),
    ],
)
def test_a_wrong_value_ends_in_one_line_that_says_what_is_allowed(override: str, said: list[str], failing_run) -> None:
    error = failing_run(override)
    assert error.startswith("configuration error: ")
    assert error.count("\n") == 1
    assert [text for text in said if text not in error] == []


@pytest.mark.parametrize("group", OPTIONS)
def test_an_unknown_choice_ends_in_one_line_with_the_choices_there_are(group: str, failing_run) -> None:
    options = ", ".join(sorted(OPTIONS[group]))
    assert failing_run(f"{group}=other") == f"configuration error: {group}=other is not known: use one of {options}\n"


# ---------------------------------------------------------------------------------------------- arguments to drop

DIGITS_NET = {"channels": 32, "hidden": 128, "dropout": 0.4, "learning_rate": 0.005, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], DIGITS_NET),
        (["model.hidden=8"], DIGITS_NET | {"hidden": 8}),
        (["data._target_=my.Data"], DIGITS_NET),
        (["model=digits_net"], DIGITS_NET),
        (["model._target_=my.Net"], {}),
        (["model=digits_net", "model._target_=my.Net"], {}),
        (["model._target_=my.Net", "model.hidden=8"], {"hidden": 8}),
        (["model.hidden=128", "model._target_=my.Net"], {"hidden": 128}),
        (["model._target_=my.Net", "+model.depth=3"], {"depth": 3}),
        (["model._target_=my.Net", "++model.depth=3"], {"depth": 3}),
        (["++model._target_=my.Net"], {}),
        (["model._target_=my.Net", "+model.optimizer.lr=1"], {"optimizer": {"lr": 1}}),
        (["model._target_=my.Net", "+model.name='a=b'"], {"name": "a=b"}),
        (["model._target_=my.Net", "data.batch_size=8"], {}),
        (["model._target_=my.Net", "model.hidden=${data.batch_size}"], {"hidden": 16}),
        (["model._target_=my.Net", "+model.seed=${seed}"], {"seed": 42}),
    ],
)
def test_a_class_named_on_the_command_line_gets_only_the_arguments_given_there(
    overrides: list[str], kept: dict[str, Any]
) -> None:
    cfg = composed(*overrides)
    target = "my.Net" if any("model._target_" in override for override in overrides) else cfg.model._target_
    arguments = OmegaConf.to_container(drop_unused_arguments(cfg, "model", overrides), resolve=True)
    assert arguments == {"_target_": target} | kept


def test_dropping_arguments_leaves_the_configuration_as_it_is() -> None:
    overrides = ["model._target_=my.Net"]
    cfg = composed(*overrides)
    drop_unused_arguments(cfg, "model", overrides)
    assert cfg == composed(*overrides)
