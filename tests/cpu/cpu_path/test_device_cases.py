"""Cases that are written once for every device, on the CPU path."""

from __future__ import annotations

import causal_sequences_on_devices as causal_sequences
import pytest
import shared_keys_on_devices as shared_keys
import wide_heads_on_devices as wide_heads

pytestmark = pytest.mark.shares(4)

test_random_causal_sequences = causal_sequences.test_random_calls
test_forward_of_shared_keys = shared_keys.test_forward
test_backward_of_shared_keys = shared_keys.test_backward
test_backward_in_order_of_shared_keys = shared_keys.test_backward_in_order
test_split_groups_of_shared_keys = shared_keys.test_split_groups
test_wide_heads = wide_heads.test_against_oracle
test_decoding_of_wide_heads = wide_heads.test_decoding
test_splits_of_wide_heads = wide_heads.test_splits_of_many_queries
