"""Measuring headrace beside other engines. Not part of the package; docs/benchmarks.md says how it is run."""
