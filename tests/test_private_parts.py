"""What the package uses of Lightning and torch without a promise that it stays: fails when an upgrade changes it.

Checked on Lightning 2.6.6 and torch 2.13.0. Behaviour is tested where it is used; these say which part moved.
"""

from __future__ import annotations

import inspect
import warnings

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch import nn
from torch.distributed import distributed_c10d


def parameters_of(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_epoch_loop_moves_schedulers_through_one_method() -> None:
    assert parameters_of(_TrainingEpochLoop.update_lr_schedulers) == ["self", "interval", "update_plateau_schedulers"]
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert 'self.update_lr_schedulers("step", update_plateau_schedulers=False)' in source
    loop = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit_loop.epoch_loop
    loop.update_lr_schedulers = len  # an instance attribute wins, and is removed again
    assert vars(loop).pop("update_lr_schedulers") is len
    assert inspect.ismethod(loop.update_lr_schedulers)


def test_the_loss_arrives_divided_by_the_windows_nominal_length() -> None:
    result = ClosureResult.from_training_step_output(torch.tensor(6.0), normalize=3)
    assert result.closure_loss == 2.0


def test_backward_is_three_calls_of_the_precision_plugin() -> None:
    source = inspect.getsource(Strategy.backward)
    calls = ["self.pre_backward(", "precision_plugin.pre_backward(", "precision_plugin.backward(", "post_backward("]
    positions = [source.index(call) for call in calls]
    assert positions == sorted(positions)
    assert parameters_of(Strategy.backward) == ["self", "closure_loss", "optimizer", "args", "kwargs"]


def test_set_up_calls_configure_ddp_before_the_optimizers() -> None:
    source = inspect.getsource(DDPStrategy.setup)
    assert source.index("self.configure_ddp()") < source.index("self.setup_optimizers(trainer)")


def test_methods_that_are_overridden_exist_with_these_parameters() -> None:
    for name, expected in {
        "optimizer_step": ["self", "optimizer", "closure", "model", "kwargs"],
        "training_step": ["self", "args", "kwargs"],
        "on_train_batch_start": ["self", "batch", "batch_idx"],
        "save_checkpoint": ["self", "checkpoint", "filepath", "storage_options"],
        "load_optimizer_state_dict": ["self", "checkpoint"],
        "block_backward_sync": ["self"],
        "teardown": ["self"],
        "on_exception": ["self", "exception"],
        "_setup_model": ["self", "model"],
    }.items():
        assert parameters_of(getattr(DDPStrategy, name)) == expected, name
    assert "strategy_registry" in parameters_of(DDPStrategy.register_strategies)
    assert "override" in parameters_of(StrategyRegistry.register)


def test_loops_ask_a_source_for_their_loaders_and_prepare_each_in_one_function() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop]
    for loop in loops:
        loop._data_source.dataloader = list  # an instance attribute wins, and is removed again
        assert data_connector._request_dataloader(loop._data_source) == []
        assert vars(loop._data_source).pop("dataloader") is list
    names = ["trainer", "trainer_fn", "stage", "dataloader"]
    assert parameters_of(data_connector._process_dataloader) == names
    assert parameters_of(data_connector._resolve_overfit_batches) == ["combined_loader", "mode"]
    for loop in (trainer.fit_loop, trainer.test_loop):
        source = inspect.getsource(type(loop).setup_data)
        assert "_process_dataloader(trainer, trainer_fn, stage, dl)" in source
        assert "isinstance(" in source, "a CombinedLoader is taken as it is"


def test_attributes_that_are_read_exist() -> None:
    assert MixedPrecision("bf16-mixed", "cpu").scaler is None
    assert DDPStrategy()._ddp_kwargs == {}
    assert LightningModule()._trainer is None


def test_torchs_schedulers_ask_the_optimizer_whether_it_stepped() -> None:
    for opt_called, expected in ((False, 1), (True, 0)):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        if opt_called:
            optimizer._opt_called = True
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step()
        assert len([w for w in caught if "lr_scheduler.step()" in str(w.message)]) == expected


def test_the_default_group_has_a_store_that_all_ranks_share() -> None:
    assert parameters_of(distributed_c10d._get_default_store) == []
    assert hasattr(torch.distributed.PrefixStore, "check")


def test_torchs_fused_operators_take_these_arguments() -> None:
    tensor = torch.ones(3)
    found, scale = torch.zeros(()), torch.full((), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_([tensor], found, scale)
    assert tensor.tolist() == [0.5] * 3
    assert found == 0
    copies = [torch.zeros(3)]
    torch._foreach_copy_(copies, [tensor])
    assert torch.equal(copies[0], tensor)
    torch._foreach_zero_(copies)
    assert not copies[0].any()
    assert torch._foreach_norm([tensor], float("inf"))[0] == 0.5


def test_children_are_started_by_one_method_with_a_list_of_processes() -> None:
    source = inspect.getsource(_SubprocessScriptLauncher.launch)
    assert (
        "if not self.cluster_environment.creates_processes_externally:\n            self._call_children_scripts()"
        in source
    )
    assert parameters_of(_SubprocessScriptLauncher._call_children_scripts) == ["self"]
    assert "self.procs: list[subprocess.Popen] = []" in inspect.getsource(_SubprocessScriptLauncher.__init__)


def test_the_signal_connector_asks_itself_for_its_handler_and_keeps_the_originals() -> None:
    source = inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "= [self._sigterm_notifier_fn]" in source
    assert "not self._has_already_handler(sigusr)" in source
    assert "self._original_handlers = self._get_current_signal_handlers()" in source


def test_a_training_batch_is_through_when_the_logger_connector_is_told_so() -> None:
    source = inspect.getsource(_TrainingEpochLoop.advance)
    marks = ["self.update_lr_schedulers(", 'module_hook(trainer, "on_train_batch_end"']
    marks += ["_logger_connector.on_batch_end()", "self.batch_progress.increment_completed()"]
    positions = [source.index(mark) for mark in marks]
    assert positions == sorted(positions)


def test_hydras_configuration_knows_the_one_that_it_is_a_part_of() -> None:
    assert "self.cfg.hydra._set_parent(cfg)" in inspect.getsource(HydraConfig.set_config)
    assert "experimental_rerun" in inspect.getsource(hydra.main)
