"""torch's own DDP tests, which travel in its wheel, against :class:`GradientReducer` behind torch DDP's interface.

All tests of torch's file that make a DDP module are named here, those for GPUs too: they run on CPU tensors. What does
not pass says which assertion fails, and why that is right; a difference that starts to pass is an error.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tempfile
import traceback
import unittest
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_ddp_adapter
from rank_pool import RankPool
from torch_ddp_adapter import cpu_for_gpu

SUITE = "torch.testing._internal.distributed.distributed_test"
PASSED, SKIPPED = "passed", "skipped"

PASSING = """
    test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view
    test_DistributedDataParallel_with_amp_and_grad_is_view
    test_accumulate_gradients_no_sync test_accumulate_gradients_no_sync_grad_is_view
    test_compute_bucket_assignment_by_size_sparse_error_without_logger
    test_ddp_compile_static_graph test_ddp_create_graph test_ddp_forward_backward_hook test_ddp_inference
    test_ddp_model_diff_num_params_across_ranks test_ddp_namedtuple
    test_ddp_new_tensor_in_fwd test_ddp_new_tensor_in_fwd_static_graph
    test_ddp_remove_autograd_hooks test_ddp_returns_tensor_with_no_grad test_ddp_shared_grad_acc_unused_params
    test_ddp_static_graph_nested_types test_ddp_zero_output_features
    test_grads_same_across_ranks_with_no_sync
    test_output_unused_in_loss_dict_module test_output_unused_in_loss_tuple_module
    test_post_localSGD_optimizer_parity test_post_localSGD_optimizer_parity_grad_is_view
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd
    test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
    test_post_localSGD_optimizer_step_reload
    test_stateless_api_with_ddp test_static_graph_multi_forward test_undefined_grad_parity_unused_parameters
    test_verify_model_across_rank_with_logger test_verify_model_across_rank_without_logger
"""

# Why the difference is right, how the failure reads, and the tests.
DIFFERENCES = [
    (
        "torch DDP raises, and this is right without a flag: unused parameters, changing graphs, nothing to train",
        r"not raised|Expected error was not raised",
        """test_DistributedDataParallel_requires_grad test_ddp_control_flow_different_across_ranks
        test_ddp_control_flow_same_across_ranks test_ddp_multiple_nested_unused_params_err_ignore_params
        test_ddp_multiple_nested_unused_params_error test_ddp_unused_params_rebuild_buckets_exception
        test_invalid_static_graph""",
    ),
    (
        "communication hooks belong to torch DDP's own buckets",
        r"no attribute 'register_comm_hook'",
        """test_accumulate_gradients_no_sync_allreduce_hook test_accumulate_gradients_no_sync_allreduce_with_then_hook
        test_ddp_hook_parity_allreduce test_ddp_hook_parity_allreduce_process_group test_ddp_hook_parity_post_localSGD
        test_ddp_hook_parity_powerSGD test_ddp_hook_pickling_powerSGD test_ddp_python_error_logged""",
    ),
    (
        "buffers are sent once, at the start, not before every forward",
        r"_register_buffer_comm_hook|forward_sync_buffers|0 not greater than 0|not close",
        """test_ddp_broadcast_buffer test_ddp_broadcast_buffer_via_hook test_ddp_broadcast_buffers_deprecation_warning
        test_ddp_buffer_hook_allreduce test_ddp_buffer_hook_allreduce_return_future
        test_ddp_init_sync_buffers_with_forward_sync_buffers_false
        test_ddp_join_respects_forward_sync_buffers_false""",
    ),
    (
        "join: ranks with less data go on with batches that count 0, so nothing is divided by who is left",
        r"no attribute 'join'",
        """test_ddp_grad_div_uneven_inputs test_ddp_join_model_equivalence test_ddp_uneven_input_exception
        test_ddp_uneven_input_join_disable test_ddp_uneven_inputs test_ddp_uneven_inputs_stop_iteration_sync_bn""",
    ),
    (
        "reads torch DDP's own log",
        r"_get_ddp_logging_data|_set_ddp_runtime_logging_sample_rate",
        """test_ddp_comm_hook_logging test_ddp_logging_data_cpu test_ddp_logging_data_gpu
        test_different_graph_across_ranks test_sync_bn_logged""",
    ),
    (
        "reads or sets what is private to torch DDP",
        r"no attribute '_build_params_for_reducer|_get_data_parallel_params|broadcast_bucket_size|_ddp_graph_static"
        r"|_set_ddp_sink_clone|_set_static_graph'",
        """test_ddp_build_debug_param_to_name_mapping test_ddp_build_debug_param_to_name_mapping_requires_grad
        test_ddp_sink_noclone test_ddp_sync_module_states test_detect_ddp_is_actually_static
        test_get_data_parallel_params test_static_graph_api_cpu""",
    ),
    (
        "an argument without a meaning here: precision is the caller's, caps are two numbers, groups are given as such,"
        " a bucket that nobody used travels all the same",
        r"the reducer has nothing like (mixed_precision|bucket_cap_mb_list|device_mesh|skip_all_reduce_unused_params)",
        """test_ddp_bucket_cap_mb_list test_ddp_device_mesh_initialization
        test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none
        test_ddp_native_mixed_precision_ignored_params
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none
        test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none
        test_skip_all_reduce_unused_parameters""",
    ),
    (
        "an optimizer that steps inside backward steps before the average is there",
        r"not close",
        """test_ddp_apply_optim_in_backward test_ddp_apply_optim_in_backward_grad_as_bucket_view_false
        test_ddp_apply_optim_in_backward_ignored_params""",
    ),
    (
        "the loss is weighted before backward, also for parameters that are left out of the reduction",
        r"not close",
        "test_ddp_ignore_params_arg",
    ),
    (
        "counts one all-reduce a step; here the ballot is a second one",
        r"Expected 6 but got 12",
        "test_ddp_profiling_torch_profiler",
    ),
    (
        "needs a GPU: SyncBatchNorm, the index of a device",
        r"expected input tensor to be on GPU|Cannot access accelerator|None mismatch: None is not \d",
        """test_DistributedDataParallel_SyncBatchNorm test_DistributedDataParallel_SyncBatchNorm_2D_Input
        test_DistributedDataParallel_SyncBatchNorm_Channels_Last
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value
        test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient
        test_DistributedDataParallel_SyncBatchNorm_No_Affine
        test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process
        test_DistributedDataParallel_SyncBatchNorm_half test_ddp_device""",
    ),
]

SKIPPED_BY_TORCH = """
    test_DistributedDataParallel test_DistributedDataParallel_non_default_stream
    test_compute_bucket_assignment_by_size_sparse_error_with_logger test_ddp_has_finalized
    test_ddp_model_diff_shape_across_ranks test_ddp_profiling_autograd_profiler test_ddp_profiling_execution_trace
    test_ddp_sync_bn_training_vs_eval
"""

# Of those that pass, the ones that compare numbers with one process or between ranks.
SEE_A_MISSING_REDUCTION = """
    test_DistributedDataParallelCPU test_accumulate_gradients_no_sync
    test_grads_same_across_ranks_with_no_sync
"""


def torch_suite() -> ModuleType:
    """torch's test module, imported as for gloo, with its demands for GPUs lifted."""
    if SUITE not in sys.modules:
        os.environ.update(BACKEND="gloo", INIT_METHOD="file://unused", TEMP_DIR=tempfile.gettempdir())
        from torch.testing._internal import common_distributed

        lifted = {
            "skip_if_no_gpu": lambda test: test,
            "skip_if_lt_x_gpu": lambda count, **options: lambda test: test,
        }
        with mock.patch.multiple(common_distributed, **lifted):
            importlib.import_module(SUITE)
    return sys.modules[SUITE]


def run_torch_test(rank: int, name: str, adapter: str) -> tuple[str, str]:
    """Runs one of torch's tests on this rank: how it ended, and where it failed."""
    module = torch_suite()
    from torch.testing._internal.common_utils import TestCase

    class Case(module.DistributedTest._DistTestBase, TestCase):
        _barrier = staticmethod(lambda *args, **options: dist.barrier())
        world_size = property(lambda self: os.environ["WORLD_SIZE"])

    case = Case(name)
    case.rank = rank
    wrapper = getattr(torch_ddp_adapter, adapter)
    torch.manual_seed(1234)
    dist.barrier()  # a rank that skips at once would leave before the other has come
    with ExitStack() as stack:
        stack.enter_context(cpu_for_gpu())
        for place in (torch.nn.parallel, module):
            stack.enter_context(mock.patch.object(place, "DistributedDataParallel", wrapper))
        one_each = mock.Mock(return_value=[[r] for r in range(dist.get_world_size())])
        stack.enter_context(mock.patch.object(module, "init_multigpu_helper", one_each))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.callback(dist.set_debug_level, dist.get_debug_level())
        try:
            getattr(case, name)()
        except unittest.SkipTest:
            return SKIPPED, ""
        except Exception as error:
            return f"{type(error).__name__}: {error}", traceback.format_exc()
    return PASSED, ""


def ddp_test_names(rank: int) -> list[str]:
    """Names of torch's tests that make a DDP module, by themselves or through a helper."""
    base = torch_suite().DistributedTest._DistTestBase
    functions = {name: f for name, f in inspect.getmembers(base, inspect.isfunction) if not name.startswith("__")}
    sources = {name: inspect.getsource(inspect.unwrap(function)) for name, function in functions.items()}
    found = {name for name, source in sources.items() if "DistributedDataParallel(" in source}
    while more := {n for n, source in sources.items() if any(f"self.{f}(" in source for f in found)} - found:
        found |= more
    return sorted(name for name in found if name.startswith("test"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes of this module's own: torch's test library changes global settings when it is imported."""
    pool = RankPool(2)
    yield pool
    pool.close()


def outcomes(pool: RankPool, name: str, adapter: str = "DataParallel") -> list[tuple[str, str]]:
    return pool.run(2, run_torch_test, name, adapter, timeout=60, group_timeout=10)


@pytest.mark.parametrize("name", PASSING.split())
def test_passes(pool: RankPool, name: str) -> None:
    for rank, (outcome, trace) in enumerate(outcomes(pool, name)):
        assert outcome == PASSED, f"rank {rank}\n{trace}"


@pytest.mark.parametrize(
    ("name", "message", "reason"),
    [pytest.param(name, message, reason, id=name) for reason, message, names in DIFFERENCES for name in names.split()],
)
def test_differs_for_a_reason(pool: RankPool, name: str, message: str, reason: str) -> None:
    ended = [outcome for outcome, _ in outcomes(pool, name)]
    assert PASSED not in ended, f"passes now: move it; it was listed because: {reason}"
    assert any(re.search(message, outcome) for outcome in ended), f"fails, but not because: {reason}\n{ended}"


@pytest.mark.parametrize("name", SKIPPED_BY_TORCH.split())
def test_is_skipped_by_torch_itself(pool: RankPool, name: str) -> None:
    assert [outcome for outcome, _ in outcomes(pool, name)] == [SKIPPED] * 2


@pytest.mark.parametrize("name", SEE_A_MISSING_REDUCTION.split())
def test_sees_gradients_that_were_not_reduced(pool: RankPool, name: str) -> None:
    assert any(outcome.startswith("AssertionError") for outcome, _ in outcomes(pool, name, "NeverReduces"))


def test_every_one_of_torchs_ddp_tests_is_listed_once(pool: RankPool) -> None:
    listed = " ".join([PASSING, SKIPPED_BY_TORCH, *(names for _, _, names in DIFFERENCES)]).split()
    assert sorted(listed) == pool.run(2, ddp_test_names)[0]
