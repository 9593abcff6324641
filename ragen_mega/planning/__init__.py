"""Prediction of a step before anything is rented: its memory, its seconds and its layouts."""
