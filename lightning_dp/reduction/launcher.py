"""Launching buckets as their gradients arrive: strictly in order, on every rank the same."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_dp.errors import LateGradientError
from lightning_dp.insight.timeline import Timeline
from lightning_dp.reduction.buckets import Bucket, BucketPlan
from lightning_dp.reduction.nonfinite import LocalCheck
from lightning_dp.reduction.transport import Transfer, Transport


class Launcher:
    """The buckets of one plan and, during a backward, which of them have left.

    Bucket k leaves before bucket k + 1 on every rank, whatever order gradients arrive in: ranks whose collectives are
    issued in different orders would add up different buckets, or wait for each other for ever.

    Args:
        plan: Layout of the buckets.
        named_parameters: The parameters that the plan was made from.
        transport: How buckets are summed.
        rank: This rank, for messages.
        check: Looks at each bucket before it leaves; ``None`` does not look.
        timeline: Notes when each bucket was ready, launched and done.

    Attributes:
        buckets: The buckets, in launch order.
        launched: Number of buckets that have left.
        used: For each parameter whether this rank had a gradient for it, once all have left.
    """

    # Above this many elements a gradient is moved into its bucket at once, while it is in the cache; smaller ones are
    # moved together, one fused copy a bucket. On a GPU the fused copy serves all, as a launch costs more than a miss.
    EAGER_COPY_NUMEL = 16_384

    def __init__(
        self,
        plan: BucketPlan,
        named_parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        rank: int,
        check: LocalCheck | None,
        timeline: Timeline,
    ) -> None:
        self._named = named_parameters
        self._transport = transport
        self._rank = rank
        self._check = check
        self._timeline = timeline
        parameters = [parameter for _, parameter in named_parameters]
        self.buckets = [Bucket(layout, parameters, transport.sums_in(layout.dtype)) for layout in plan.buckets]
        self._bucket_of, self._slot_of = [0] * len(parameters), [0] * len(parameters)
        for number, bucket in enumerate(self.buckets):
            transport.reserve(bucket, number)
            for slot, index in enumerate(bucket.layout.indices):
                self._bucket_of[index], self._slot_of[index] = number, slot
        self._eager = [p.numel() >= self.EAGER_COPY_NUMEL and p.device.type == "cpu" for p in parameters]
        self.arm(None)

    def arm(self, expected: Sequence[int] | None) -> None:
        """Makes ready for one backward.

        Args:
            expected: How often each parameter fires in it; a bucket leaves when all of its trainable parameters have.
                ``None``: nothing leaves before :meth:`launch_rest`.
        """
        self._expected = expected
        if self._check is not None:
            self._check.start_pass()
        self._fires = [0] * len(self._named)
        self._pending = [[p.requires_grad for p in bucket.parameters].count(True) for bucket in self.buckets]
        self._transfers: list[Transfer] = []
        self._prepared = 0
        self.launched = 0
        self.used = [True] * len(self._named)

    def arrived(self, index: int) -> None:
        """Takes note that the gradient of parameter ``index`` was accumulated; launches what became complete.

        Raises:
            LateGradientError: If its bucket has left already.
        """
        self._fires[index] += 1
        number = self._bucket_of[index]
        if number < self.launched:
            raise LateGradientError(
                f"rank {self._rank}: the gradient of '{self._named[index][0]}' changed after its bucket had been"
                f" sent: it was accumulated {self._fires[index]} times in this backward, more often than in the first"
                " one; use overlap=False for this model"
            )
        if self._eager[index]:
            bucket, slot = self.buckets[number], self._slot_of[index]
            if self._check is not None and self._expected is not None:
                self._check.take(bucket, slot)
            else:
                bucket.take(slot)
        if self._expected is not None and self._fires[index] == self._expected[index]:
            self._pending[number] -= 1
            if self._pending[number] == 0:
                self._timeline.mark("ready", number)
                while self.launched < len(self.buckets) and self._pending[self.launched] == 0:
                    self._launch()

    def launch_rest(self) -> None:
        """Launches all buckets that have not left, complete or not; a missing gradient counts as zero."""
        while self.launched < len(self.buckets):
            self._launch()

    def prepare_rest(self) -> None:
        """Completes all buckets that have not left, and looks at them; they leave as they are then."""
        while self._prepared < len(self.buckets):
            self._prepare()

    def leave_out(self) -> None:
        """Makes all buckets zero, none of which has left: this rank then contributes nothing."""
        assert not self.launched
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = list(range(len(bucket.parameters)))
        self.used = [False] * len(self._named)

    def wait(self) -> None:
        """Waits for all buckets (on a GPU: makes the current stream wait)."""
        for number, transfer in enumerate(self._transfers):
            self._transport.finish(transfer)
            self._timeline.mark("done", number)

    def _launch(self) -> None:
        number = self.launched
        if number == self._prepared:
            self._prepare()
        self._timeline.mark("launch", number)
        self._transfers.append(self._transport.start(self.buckets[number], number, len(self.buckets)))
        self.launched += 1

    def _prepare(self) -> None:
        bucket = self.buckets[self._prepared]
        self._timeline.mark("ready", self._prepared)
        self._prepared += 1
        if self._check is not None:
            self._check.close(bucket)
        for slot in bucket.fill():
            self.used[bucket.layout.indices[slot]] = False
        if self._check is not None:
            self._check.look(bucket)
