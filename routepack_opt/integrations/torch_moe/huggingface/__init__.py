"""Hugging Face configurations, names and weights, read and written."""
