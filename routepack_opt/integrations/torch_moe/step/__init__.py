"""One optimizer step over planned cells: samples, replayed routes, checks, sums."""
