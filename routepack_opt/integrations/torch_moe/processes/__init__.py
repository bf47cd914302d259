"""One process a rank: start, watch, join."""
