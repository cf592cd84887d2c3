"""The layer between the public functions and the host calls: autograd, operators, mod names."""
