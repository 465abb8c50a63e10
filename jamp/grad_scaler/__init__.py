"""`GradScaler`, an immutable pytree with the methods of `torch.amp.GradScaler`."""

from ._plain import GradScalerStep as GradScalerStep
from ._scaler import GradScaler as GradScaler

__all__ = ["GradScaler", "GradScalerStep"]
