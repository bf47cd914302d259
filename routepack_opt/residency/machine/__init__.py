"""The package: its description, hardware graph, models, and how much of a model fits."""
