"""Mathematics: how work is cut, when a version closes, how updates fold. Knows no network."""
