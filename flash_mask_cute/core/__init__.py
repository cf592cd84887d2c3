"""Device code that knows neither an architecture nor a mask: softmax, scheduling, pipelines."""
