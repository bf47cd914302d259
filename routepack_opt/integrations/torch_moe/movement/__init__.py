"""Experts change EP rank between steps, with masters and moments."""
