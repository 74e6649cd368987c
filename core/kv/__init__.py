"""Blocks of the KV cache: accounting without torch, and the tensors themselves."""
