"""Queues that carry out a phase's instructions: worker threads, and an adversarial kind for tests."""
