"""Training state on disk, whole or absent, for any plan of the same model."""
