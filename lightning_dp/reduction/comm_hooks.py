"""torch DDP's communication hooks over our buckets: compression such as PowerSGD, and users' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_dp.reduction.buckets import Bucket
from lightning_dp.reduction.transport import Transfer, Transport
from lightning_dp.reduction.wire import Wire

Hook = Callable[[Any, Any], Any]  # (state, bucket) -> future of the average of all ranks' buffers


class HookBucket:
    """What a hook sees of a bucket: the methods of ``torch.distributed.GradBucket``, which cannot be made in Python."""

    def __init__(self, bucket: Bucket, number: int, last: bool) -> None:
        self._bucket, self._number, self._last = bucket, number, last
        self._buffer = bucket.flat

    def buffer(self) -> Tensor:
        """The gradients, flat."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another tensor in the buffer's place, as hooks that wrap others do."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients, as views of the buffer."""
        return list(self._bucket.views)

    def parameters(self) -> list[Tensor]:
        """Their parameters."""
        return list(self._bucket.parameters)

    def index(self) -> int:
        """Number of the bucket in the order of launching."""
        return self._number

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._last


@dataclass
class HookTransfer(Transfer):
    """One bucket on its way through a hook.

    Attributes:
        future: What the hook returned.
    """

    future: Any = None


class HookTransport(Transport):
    """Lets a hook average buckets; gradients must be weighted so that their average is what is wanted.

    Args:
        wire: The ranks; what the hook sends is not counted there.
        hook: The hook.
        state: Handed to the hook.
    """

    LOSES_RANGE = True  # for all that is known of a hook

    def __init__(self, wire: Wire, hook: Hook, state: Any) -> None:
        super().__init__(wire)
        self._hook, self._state = hook, state
        self._under_way: HookTransfer | None = None

    def start(self, bucket: Bucket, number: int, total: int) -> Transfer:
        """Hands a filled bucket to the hook; all ranks do so in the same order."""
        what = f"the communication hook on bucket {number} of {total}"
        if bucket.flat.numel() == 0:
            return HookTransfer(bucket.flat, what)
        if self._under_way is not None and bucket.flat.device.type == "cpu":
            # Hooks such as PowerSGD send a second message when the first has arrived, which without a stream may be
            # at any time: if two buckets were under way, ranks could send in different orders.
            self._wire.wait(self._under_way.future, self._under_way.what)
        future = self._hook(self._state, HookBucket(bucket, number, number + 1 == total))
        self._under_way = HookTransfer(bucket.flat, what, future=future)
        return self._under_way

    def finish(self, transfer: Transfer) -> None:
        """Waits until a bucket holds what the hook made of it.

        Raises:
            CommunicationError: If another rank stopped or did not arrive in time.
        """
        assert isinstance(transfer, HookTransfer)
        if transfer.future is None:
            return  # empty, or finished before
        self._under_way = None
        self._wire.wait(transfer.future, transfer.what)
        result = transfer.future.value()
        result = result[0] if isinstance(result, (list, tuple)) else result
        if result.data_ptr() != transfer.flat.data_ptr() or result.dtype != transfer.flat.dtype:
            transfer.flat.copy_(result.view_as(transfer.flat))
        transfer.future = None
