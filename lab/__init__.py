"""Work for Blackwell that no GPU has run: a model of its kernels, which predicts their shares of
tensor time, and the steps of a first run on such a GPU (lab/README.md)."""
