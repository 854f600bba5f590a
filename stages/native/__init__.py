"""The one part of the tool that is not Python: where freed pages wait for the next tensors."""
