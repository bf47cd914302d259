"""Process groups, dispatch by slot, gradients and optimizer state over EP and EDP."""
