"""Exception types of the package.

Each message says what happened, on which rank, parameter or step, and what to do about it.
"""


class LightningDPError(RuntimeError):
    """Base class of the errors raised while training."""


class ConfigurationError(ValueError):
    """A setting that the user passed cannot be used; the message lists what can."""


class PreflightError(LightningDPError):
    """Ranks are missing, differ, or cannot reach each other (see :mod:`lightning_dp.health.preflight`)."""


class CountError(LightningDPError, ValueError):
    """A micro-batch has no usable count (see :mod:`lightning_dp.data.counts`)."""


class StructureMismatchError(LightningDPError):
    """Ranks hold models whose tensors differ in name, shape, dtype or ``requires_grad``."""


class LateGradientError(LightningDPError):
    """A gradient changed after the bucket that holds it had been sent."""


class UnreducedGradientError(LightningDPError):
    """An optimizer is about to step on gradients that were never averaged over the ranks."""


class CommunicationError(LightningDPError):
    """A collective did not complete: a peer stopped, or did not arrive within the timeout."""


class NonFiniteGradientError(LightningDPError):
    """A gradient held NaN or Inf and the policy, or the limit on consecutive skips, ends the run."""


class ReplicaMismatchError(LightningDPError):
    """Ranks no longer hold the same parameters, buffers or optimizer state."""


class SameDataError(LightningDPError):
    """Ranks read the same batches, or their samplers disagree."""


class UnevenDataError(LightningDPError):
    """Ranks have different numbers of batches where the settings do not allow it, or cannot go on from a checkpoint."""


class CountWarning(UserWarning):
    """The count of a micro-batch is a guess."""
