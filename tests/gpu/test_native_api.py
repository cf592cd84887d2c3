"""The kernel class used with `cute.compile` directly, on a GPU."""

from native_api_on_devices import (  # noqa: F401
    test_compile_and_call_with_cute_tensors,
    test_options_that_this_kernel_lacks_are_refused,
)
