"""Annealing of layouts: moves of samples between cells, scored incrementally and exactly."""
