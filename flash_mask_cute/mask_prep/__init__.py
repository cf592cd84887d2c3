"""What is computed of a mask before attention. Each concept is a host half and its kernel."""
