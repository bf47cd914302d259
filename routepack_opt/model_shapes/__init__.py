"""Dimensions of MoE models, and the cost model that follows from them (``CostModel.for_model``)."""

from __future__ import annotations

from routepack_opt.model_shapes.config import model_shape
from routepack_opt.model_shapes.presets import PRESETS
from routepack_opt.model_shapes.shape import Attention, Layer, ModelShape, cost_for_model

__all__ = ["PRESETS", "Attention", "Layer", "ModelShape", "cost_for_model", "model_shape"]
