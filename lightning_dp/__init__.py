"""Synchronous data parallelism for Lightning that takes the step one device would take.

Importing this package makes ``Trainer(strategy="bucketed_ddp")`` and ``Fabric(strategy="bucketed_ddp")`` known to
Lightning.
"""

from lightning_dp import fabric
from lightning_dp.callbacks import SafeRequeue
from lightning_dp.other_namespaces import refuse_in_other_namespaces
from lightning_dp.reduction import GradientReducer, ReducerConfig
from lightning_dp.strategy import BucketedDDPStrategy

refuse_in_other_namespaces()

__version__ = "0.1.0"
__all__ = ["BucketedDDPStrategy", "GradientReducer", "ReducerConfig", "SafeRequeue", "__version__", "fabric"]
