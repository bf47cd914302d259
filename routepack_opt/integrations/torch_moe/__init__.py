"""EP x EDP trainer in torch.distributed: planned cells, experts that move with their optimizer state."""
