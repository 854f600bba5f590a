"""Memory under the budget (the arena) and what lies beyond it (the disk)."""
