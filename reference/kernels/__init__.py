"""Compute kernels: a plain-torch version of each, which is its definition."""
