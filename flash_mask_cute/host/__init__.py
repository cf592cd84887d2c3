"""Host side of a call: check arguments, name the compiled kernel, compile it once and keep it."""
