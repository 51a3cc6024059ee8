"""Pure tensor functions: each a torch reference, later with a faster twin of the same signature."""
