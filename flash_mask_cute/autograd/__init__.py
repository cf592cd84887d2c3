"""Between the public functions and the host calls: autograd, operators, names of callables."""
