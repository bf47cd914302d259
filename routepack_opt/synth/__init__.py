"""Synthetic windows from published statistics: ``synth("flash", seed=0)`` gives a Window like a real RL step."""

from __future__ import annotations

from routepack_opt.synth.generate import synth
from routepack_opt.synth.presets import PRESETS, SynthPreset

__all__ = ["PRESETS", "SynthPreset", "synth"]
