"""Typed contracts between the stages. Imports no stage and no torch."""
