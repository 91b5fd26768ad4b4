"""Small things on the standard library only."""
