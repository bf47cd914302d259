"""GRPO on a small verifiable task: sample, plan with RoutePack, move experts, train (see docs/training.md)."""
