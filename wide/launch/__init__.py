"""Where processes run: this machine."""
