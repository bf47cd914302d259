"""Offline certification: many windows or bin-packing instances in, one proved row count each out.

``cases`` reads what is to be certified, ``certify_case`` solves one and re-checks it, ``journal`` keeps results line by
line, ``workers`` and ``ray_workers`` run many at once, ``run`` ties them together.
"""

from routepack_opt.certify.cases import Case, read_cases
from routepack_opt.certify.journal import Journal
from routepack_opt.certify.one import Settings, certify_case
from routepack_opt.certify.run import certify_all

__all__ = ["Case", "Journal", "Settings", "certify_all", "certify_case", "read_cases"]
