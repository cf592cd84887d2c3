"""Code independent of attention: compiling, caching, identities of callables, devices."""
