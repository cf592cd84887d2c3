"""Mask rules as plain arithmetic, independent of architecture and direction."""
