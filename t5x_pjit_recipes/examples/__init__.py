"""Reference networks that the gin files name."""
