"""One decision window on a package: layouts, copies under way, stage and event level, energy."""
