"""The same windows under different methods and budgets, every result checked and scored by the same exact code.

- :mod:`.case` a window with its settings, and what a method answers;
- :mod:`.methods` the named methods; :mod:`.heuristics` what others do today; :mod:`.external` installed packages;
- :mod:`.judge` scores and verifies an answer; :mod:`.experiment` runs windows x methods x budgets x seeds, resumable;
- :mod:`.summary` medians over seeds. Pages and figures are in :mod:`routepack_opt.report`.
"""
