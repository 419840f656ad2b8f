"""torch DDP's interface over :class:`GradientReducer`, and a stand-in for GPUs: what torch's own DDP tests need."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.reduction.replication import broadcast_from_rank_zero, verify_same_structure
from lightning_dp.reduction.wire import Wire


class DataParallel(nn.Module):
    """A wrapper with torch DDP's signature whose gradients go through a :class:`GradientReducer`.

    The backward pass begins where the gradient of an output arrives and ends with the autograd engine's. Each pass
    counts 1, so what comes out is torch DDP's mean over ranks. Arguments that ask for what is always so, or say where
    the module is, are accepted.

    Args:
        module: The module to replicate.
        process_group: Group of the replicas; ``None`` is the default group.
        bucket_cap_mb: Cap on a bucket in MiB.
        **accepted: torch DDP's other arguments.
    """

    ACCEPTED = frozenset(
        [
            "device_ids",
            "output_device",
            "broadcast_buffers",
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
        ]
    )

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        **accepted: Any,
    ) -> None:
        super().__init__()
        unknown = accepted.keys() - self.ACCEPTED
        if unknown:
            raise TypeError(f"the reducer has nothing like {', '.join(sorted(unknown))}")
        self.module = module
        self._cap = bucket_cap_mb or 25.0
        self._attach(process_group)

    def _attach(self, group: dist.ProcessGroup | None) -> None:
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        wire = Wire(group)
        states = [*self.module.named_parameters(), *self.module.named_buffers()]
        states = [(name, tensor) for name, tensor in states if name not in ignored]
        verify_same_structure(states, wire)
        broadcast_from_rank_zero((tensor for _, tensor in states), wire)
        self.process_group = group
        self._pass: ExitStack | None = None
        self._reducer = GradientReducer(
            [(name, p) for name, p in self.module.named_parameters() if name not in ignored],
            group=group,
            config=ReducerConfig(bucket_cap_mb=self._cap),
        )

    # ------------------------------------------------------------------------------------------- torch DDP's methods

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        leaves, structure = tree_flatten(output)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if at and torch.is_grad_enabled():
            for i, tensor in zip(at, _Outputs.apply(self, *(leaves[i] for i in at)), strict=True):
                leaves[i] = tensor
        return tree_unflatten(leaves, structure)

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        with self._reducer.no_sync():
            yield

    @property
    def reducer(self) -> _TorchReducer:
        return _TorchReducer(self._reducer)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Iterable[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]

    def _remove_autograd_hooks(self) -> None:
        self._reducer.detach()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("process_group", "_reducer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach(None)

    # ------------------------------------------------------------------------------------------- one backward

    def open_pass(self) -> float:
        """The weight of the pass under way; begins one if there is none."""
        if self._pass is None:
            self._pass = ExitStack()
            self._weight = self._pass.enter_context(self._reducer.backward_pass(1, divided_by=None))
            torch.autograd.Variable._execution_engine.queue_callback(self._close_pass)
        return self._weight

    def _close_pass(self) -> None:
        stack, self._pass = self._pass, None
        assert stack is not None
        stack.close()


class NeverReduces(DataParallel):
    """The negative control: every rank keeps its own gradient."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reducer._sync = False
        return super().forward(*args, **kwargs)


class _Outputs(torch.autograd.Function):
    """Hands outputs on; in backward it is reached before any parameter."""

    @staticmethod
    def forward(ctx: Any, adapter: DataParallel, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.adapter = adapter
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight = ctx.adapter.open_pass()
        return (None, *(None if grad is None else grad * weight for grad in grads))


class _TorchReducer:
    """What torch's tests read off the reducer of torch DDP."""

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer

    def _get_local_used_map(self) -> Tensor:
        assert self._reducer.last is not None
        return torch.tensor(self._reducer.last.tally.users, dtype=torch.int32)


# ------------------------------------------------------------------------------------------- a CPU in a GPU's place


class OnCPU(TorchFunctionMode):
    """Within it tensors that are asked for on a GPU are made on, or stay on, the CPU."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(map(_on_cpu, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    is_gpu = type(value) is int or (isinstance(value, (str, torch.device)) and str(value).startswith("cuda"))
    return "cpu" if is_gpu else value


@contextmanager
def cpu_for_gpu() -> Generator[None, None, None]:
    """Runs code that was written for one GPU a rank on the CPU."""
    move = nn.Module.to
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "to", lambda module, *args: move(module, *map(_on_cpu, args))))
        for name, value in (("set_device", None), ("synchronize", None), ("current_device", 0)):
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock(return_value=value)))
        stack.enter_context(OnCPU())
        yield
