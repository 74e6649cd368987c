"""The conformance kit: one contract a slot, to be run on strangers' components and on the built-ins alike.

`headrace.testing` has the public names. Importing this package imports nothing; a contract is loaded when it is named.
"""
