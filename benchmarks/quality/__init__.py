"""How faithful this engine and others are to float32, on three texts."""
