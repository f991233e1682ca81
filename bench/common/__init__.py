"""Shared by all benchmarks: arguments, sizes, the schema of results, tables, printed reports."""
