"""Preparation of masks before attention. Each concept has a host half and a kernel."""
