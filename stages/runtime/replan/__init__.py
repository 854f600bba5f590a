"""Whether a run's first steps were as predicted, and what to plan with if they were not."""
