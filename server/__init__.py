"""HTTP in front of the line: Starlette on Hypercorn's Trio worker, and the command line."""

if __name__ != "headrace.server":
    raise ImportError("import headrace.server, not a bare server")
