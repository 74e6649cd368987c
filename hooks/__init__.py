"""The words everybody shares: messages, parameters, slots and protocols. Loads without torch."""

if __name__ != "headrace.hooks":
    raise ImportError("import headrace.hooks, not a bare hooks")
