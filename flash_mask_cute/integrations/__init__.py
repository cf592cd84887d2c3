"""Doors for other libraries, a module for each. None is imported by the package itself."""
