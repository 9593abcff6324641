"""What flows through a step - completions, trajectories, token batches - and how ranks exchange
it.
"""
