"""Reading a checkpoint: where it lies, what it holds, which Program it is."""
