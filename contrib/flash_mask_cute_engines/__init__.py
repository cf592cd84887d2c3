"""Plugins for vLLM and SGLang that have never met a running engine (contrib/README.md)."""
