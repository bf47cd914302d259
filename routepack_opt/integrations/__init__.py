"""Who calls it: one file per framework."""
