"""Only data: a profile is read, and its package never imported."""
