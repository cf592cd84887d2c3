"""Integrations with other libraries; each module imports its library, and is imported by its user
alone."""
