"""Which sequences take part in the next step, and the flat arrays they become. No torch, no Trio."""
