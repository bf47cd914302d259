"""Checkpoints in logical order."""
