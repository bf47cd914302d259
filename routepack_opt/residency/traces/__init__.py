"""Recorded routes and synthetic windows."""
