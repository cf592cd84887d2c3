"""From mods written in torch to CuTe mods: traced, simplified, written as source."""
