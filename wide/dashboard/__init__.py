"""For people's eyes: now the terminal. Reads numbers; never touches training."""
