"""Automatic mixed precision for JAX."""

from . import interop as interop, optimizers as optimizers
from ._adaptive import (
    AdaptiveLossScale as AdaptiveLossScale,
    AdaptiveLossScaleState as AdaptiveLossScaleState,
)
from ._autocast import (
    AutocastReport as AutocastReport,
    AutocastRow as AutocastRow,
    autocast as autocast,
    autocast_report as autocast_report,
    full_precision as full_precision,
)
from ._castable import check_castable as check_castable
from ._config import (
    convert_loss_scale as convert_loss_scale,
    loss_scale_for as loss_scale_for,
    loss_scale_from_config as loss_scale_from_config,
)
from ._health import LossScaleError as LossScaleError, check_health as check_health
from ._lookup import (
    get_grads_finite as get_grads_finite,
    get_loss_scale as get_loss_scale,
    get_stats as get_stats,
    metrics as metrics,
    set_loss_scale as set_loss_scale,
)
from ._loss_scale import (
    DynamicLossScale as DynamicLossScale,
    DynamicLossScaleState as DynamicLossScaleState,
    LossScale as LossScale,
    NoOpLossScale as NoOpLossScale,
    NoOpLossScaleState as NoOpLossScaleState,
    StaticLossScale as StaticLossScale,
    StaticLossScaleState as StaticLossScaleState,
)
from ._master import (
    MasterParamsState as MasterParamsState,
    master_params as master_params,
    mixed_precision as mixed_precision,
)
from ._policy import Policy as Policy, get_policy as get_policy
from ._scaling import (
    grad as grad,
    scale_loss as scale_loss,
    unscale_and_check as unscale_and_check,
    value_and_grad as value_and_grad,
)
from ._stats import LossScaleStats as LossScaleStats
from ._transforms import LossScaledState as LossScaledState, loss_scaled as loss_scaled
from ._tree import all_finite as all_finite, cast_floating as cast_floating
from .grad_scaler import GradScaler as GradScaler, GradScalerStep as GradScalerStep
from .history import History as History

__version__ = "0.1.0"
