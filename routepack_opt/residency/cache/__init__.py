"""Expert caches replayed on recorded routes."""
