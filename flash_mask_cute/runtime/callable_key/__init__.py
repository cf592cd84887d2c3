"""Structural identity of user callables, for compile-cache keys.

A ``score_mod`` or ``mask_mod`` is compiled into the kernel, so everything that tracing it can see
decides the code that comes out. `callable_key` hashes exactly that:

====================================  =========================================================
what the callable reaches             what enters the key
====================================  =========================================================
Python functions, lambdas             bytecode, constants and names (nested code included),
                                      defaults, closure cells, and the globals that the bytecode
                                      loads, all by value and recursively
``cute.jit`` functions                the decorated function, as it was before tracing, and the
                                      annotations, which the DSL uses to convert arguments
bound methods, ``partial``            the function and the bound state
dataclasses, instances of own classes the class with its methods, and the attribute values
numbers, strings, containers, enums,  the value
dtypes
installed and standard modules        the name and the version; likewise what they define
own modules                           the attributes whose names the function mentions
`flash_mask_cute`                     the name (the compile cache hashes this package's sources)
====================================  =========================================================

Own means: neither in the standard library, nor in a site-packages folder with a known version, nor
part of this package. What would reach names that the code does not show raises TypeError:
``globals()``, ``eval`` and the like, the environment, and an own module that a function returns,
passes on or puts into a container. Names reached by a computed string (``getattr(module, "a" +
"b")``), and what a library's function returns by the state of the process, are not followed.

The result is equal in two processes. Only facts about immutable code objects are kept between
calls, so the key changes with globals and cells. On one core of a server it takes about 5
microseconds for a function, 3 to 6 more for each function or value that it reaches, and 50 to 200
for an object of an own class, whose methods are all encoded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flash_mask_cute.runtime.callable_key.traversal import Traversal, key_given_for

__all__ = ["callable_key"]


def callable_key(fn: Callable[..., Any]) -> str:
    """A string that is equal for two callables only if tracing them gives equal code.

    A non-empty string in ``__flash_mask_key__`` of `fn`, or of anything that it reaches, replaces
    the analysis. Raises TypeError: `fn` is not callable, or it reaches a value without a known
    structure, such as a tensor. The message names the variable."""
    if not callable(fn):
        raise TypeError(f"expected a callable, got {type(fn).__name__}")
    override = key_given_for(fn)
    if override is not None:
        return f"key:{override}"
    traversal = Traversal()
    traversal.root(fn)
    return f"py{sys.version_info.major}.{sys.version_info.minor}:{traversal.digest()}"
