"""Headrace beside other engines on the same machine and the same weights. README.md says how to run it."""
