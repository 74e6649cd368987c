"""The built-ins, one file each, registered through the same entry points as a stranger's."""

if __name__ != "headrace.plugins":
    raise ImportError("import headrace.plugins, not a bare plugins")
