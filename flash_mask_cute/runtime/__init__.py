"""What knows no attention: compiling, caching, identities of callables, devices."""
