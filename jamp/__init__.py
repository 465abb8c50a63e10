"""Automatic mixed precision for JAX."""

from . import interop as interop, optimizers as optimizers
from ._cast import cast_floating as cast_floating, check_castable as check_castable
from ._chunked_sum.api import chunked_sum as chunked_sum
from ._health import LossScaleError as LossScaleError, check_health as check_health
from ._loss_scale.adaptive import (
    AdaptiveLossScale as AdaptiveLossScale,
    AdaptiveLossScaleState as AdaptiveLossScaleState,
)
from ._loss_scale.config import loss_scale_for as loss_scale_for, loss_scale_from_config as loss_scale_from_config
from ._loss_scale.dynamic import DynamicLossScale as DynamicLossScale, DynamicLossScaleState as DynamicLossScaleState
from ._loss_scale.scaler_state import LossScaledState as LossScaledState
from ._loss_scale.static import (
    LossScale as LossScale,
    NoOpLossScale as NoOpLossScale,
    NoOpLossScaleState as NoOpLossScaleState,
    StaticLossScale as StaticLossScale,
    StaticLossScaleState as StaticLossScaleState,
)
from ._loss_scale.stats import LossScaleStats as LossScaleStats
from ._optimizer_state.eight_bit import QuantizedState as QuantizedState, quantized_state as quantized_state
from ._optimizer_state.masters import master_params as master_params
from ._optimizer_state.split_masters import MasterParamsState as MasterParamsState
from ._optimizer_state.stochastic_rounding import (
    StochasticRoundingState as StochasticRoundingState,
    stochastic_rounding as stochastic_rounding,
)
from ._products.formats import MXFP8 as MXFP8, Float8 as Float8, Int8 as Int8
from ._step.accessors import (
    convert_loss_scale as convert_loss_scale,
    get_grads_finite as get_grads_finite,
    get_loss_scale as get_loss_scale,
    get_stats as get_stats,
    metrics as metrics,
    reset as reset,
    set_loss_scale as set_loss_scale,
)
from ._step.finite import all_finite as all_finite
from ._step.gradients import grad as grad, value_and_grad as value_and_grad
from ._step.loss_scaled import loss_scaled as loss_scaled
from ._step.scale_unscale import scale_loss as scale_loss, unscale_and_check as unscale_and_check
from ._step.scaled import scaled as scaled
from ._step.skip_nonfinite import skip_nonfinite as skip_nonfinite
from ._transforms.autocast import autocast as autocast, full_precision as full_precision
from ._transforms.autocast_report import autocast_report as autocast_report
from ._transforms.memory_report import memory_report as memory_report
from ._transforms.recompute import recompute as recompute
from .grad_scaler import GradScaler as GradScaler
from .history import History as History

__version__ = "0.3.0"

__all__ = [
    "MXFP8", "AdaptiveLossScale", "AdaptiveLossScaleState", "DynamicLossScale", "DynamicLossScaleState", "Float8",
    "GradScaler", "History", "Int8", "LossScale", "LossScaleError", "LossScaleStats", "LossScaledState",
    "MasterParamsState", "NoOpLossScale", "NoOpLossScaleState", "QuantizedState", "StaticLossScale",
    "StaticLossScaleState", "StochasticRoundingState", "all_finite", "autocast", "autocast_report", "cast_floating",
    "check_castable", "check_health", "chunked_sum", "convert_loss_scale", "debug", "full_precision",
    "get_grads_finite", "get_loss_scale", "get_stats", "grad", "grad_scaler", "history", "interop", "loss_scale_for",
    "loss_scale_from_config", "loss_scaled", "master_params", "memory_report", "metrics", "optimizers",
    "quantized_state", "recompute", "reset", "scale_loss", "scaled", "set_loss_scale", "skip_nonfinite",
    "stochastic_rounding", "unscale_and_check", "value_and_grad",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import `jamp.debug` when it is first used."""
    if name == "debug":
        import importlib

        return importlib.import_module("jamp.debug")
    raise AttributeError(f"module 'jamp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "debug"})
