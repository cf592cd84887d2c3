"""Device code independent of architecture and masks: softmax, scheduling, pipelines."""
